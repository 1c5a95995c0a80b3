-- Environments, runs of them, RL jobs in them, rollouts, new prices.

create table environments (
    tenant_id text not null references tenants,
    id text not null unique,
    project_id text not null,
    name text,
    spec jsonb not null,                     -- finery.types.environments.EnvironmentSpec
    created_at timestamptz not null,
    deleted_at timestamptz,                  -- the row stays for the jobs that name it
    primary key (tenant_id, id),
    foreign key (tenant_id, project_id) references projects (tenant_id, id)
);
create index environments_by_age on environments (tenant_id, created_at, id);

-- kind `run`: grades answers in an environment; like a preview it ends with its preparation, and no list shows it.
alter table jobs drop constraint jobs_kind_check;
alter table jobs add constraint jobs_kind_check check (kind in ('job', 'preview', 'run'));
create index jobs_runs on jobs (created_at) where kind = 'run';
alter table jobs alter column training_file_id drop not null;   -- an environment may make its prompts
alter table jobs alter column model_id drop not null;           -- a run needs no model
alter table jobs add column environment_id text;                -- null where the environment came with the job
alter table jobs add column environment jsonb;                  -- as it is used
alter table jobs add foreign key (tenant_id, environment_id) references environments (tenant_id, id);
alter table jobs add constraint jobs_have_prompts check (training_file_id is not null or environment is not null);
alter table jobs add constraint jobs_have_model check (model_id is not null or kind = 'run');
alter table jobs add column run jsonb;       -- {"request": EnvironmentRunCreate, "prompt_count"?, "prompts"?, "answers"?}

alter table checkpoints add column validation_reward double precision;

-- Where the rollouts of a step lie. The latest attempt that did the step has the row.
create table rollout_files (
    tenant_id text not null,
    job_id text not null,
    kind text not null check (kind in ('train', 'eval')),
    step bigint not null check (step >= 0),
    attempt_id text not null,
    object_key text not null,
    sha256 text not null check (sha256 ~ '^[0-9a-f]{64}$'),
    bytes bigint not null check (bytes >= 0),
    count bigint not null check (count >= 0),
    created_at timestamptz not null,
    primary key (job_id, step, kind),        -- in the order in which they are listed
    foreign key (tenant_id, job_id) references jobs (tenant_id, id),
    foreign key (tenant_id, attempt_id) references attempts (tenant_id, id)
);

do $$
declare
    relation text;
begin
    foreach relation in array array['environments', 'rollout_files'] loop
        execute format('alter table %I enable row level security', relation);
        execute format('alter table %I force row level security', relation);
        execute format('create policy one_tenant on %I to finery_app using (tenant_id = current_setting(''app.tenant'', true)) '
                       'with check (tenant_id = current_setting(''app.tenant'', true))', relation);
        execute format('create policy system on %I to finery_system using (true) with check (true)', relation);
        execute format('grant select, insert, update, delete on %I to finery_system', relation);
    end loop;
end $$;
grant select, insert on environments to finery_app;
grant update (deleted_at) on environments to finery_app;
grant select on rollout_files to finery_app;

-- New units of account next to the old ones; no price changes.
update price_books set prices = '{
    "train.dpo": "0.80", "eval.dpo": "0.10", "train.rl": "0.80", "eval.rl": "0.40",
    "rollout.prefill": "0.10", "rollout.prefill_cached": "0.02", "rollout.generated": "0.40",
    "reward.cpu_seconds": "20.00", "reward.llm_input": "0.20", "reward.llm_output": "0.80"
}'::jsonb || prices;
