-- Files of more kinds, previews, chains of checkpoints, best checkpoints, deletion.

alter table files add column encoding text not null default 'jsonl' check (encoding in ('jsonl', 'parquet'));
-- A deleted file or checkpoint stays as a row, for the jobs and bills that name it; its objects are purged after commit.
alter table files add column deleted_at timestamptz, add column purged_at timestamptz;
create index files_unpurged on files (deleted_at) where deleted_at is not null and purged_at is null;
create index files_by_content on files (tenant_id, sha256) where deleted_at is null;  -- asked at every upload
grant update (deleted_at) on files to finery_app;

-- kind `preview`: a job that only renders some rows; no list or bill shows it.
alter table jobs add column kind text not null default 'job' check (kind in ('job', 'preview'));
create index jobs_previews on jobs (created_at) where kind = 'preview';  -- old ones are deleted
alter table jobs add column base jsonb not null default '[]';  -- [{"checkpoint", "kind": full | merge}], in order
alter table jobs add column data jsonb;                        -- finery.types.data.DataReport
alter table jobs add column preview jsonb;                     -- {"request": PreviewCreate, "rows"?: [PreviewRow]}
-- What stops a job early is known only to its worker: where it stopped is its last step.
alter table jobs add column stopped_step bigint;

-- What PATCH may change; the spec stays as submitted. Null: the metadata of the spec.
alter table jobs add column customer_metadata jsonb;
grant update (name, customer_metadata) on jobs to finery_app;

alter table checkpoints add column kind text not null default 'adapter' check (kind in ('adapter', 'full'));
alter table checkpoints add column validation_loss double precision;
alter table checkpoints add column deleted_at timestamptz, add column purged_at timestamptz;
create index checkpoints_unpurged on checkpoints (deleted_at) where deleted_at is not null and purged_at is null;
grant update (deleted_at) on checkpoints to finery_app;
