-- The first layout. Times are microseconds of UTC, words are their numbers (see runtara/records.py).
-- Large values stand last in their table, so that a scan of the others does not walk their overflow pages.

CREATE TABLE meta (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    next_number INTEGER NOT NULL,
    last_batch INTEGER NOT NULL
) STRICT;

INSERT INTO meta (one, next_number, last_batch) VALUES (1, 1, 0);

CREATE TABLE notes (
    name TEXT PRIMARY KEY,
    text TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- Instances that were purged and whose history is not yet swept.
CREATE TABLE purged (
    row INTEGER PRIMARY KEY
) STRICT;

-- No table of history refers to instances with a foreign key: that would cost a look-up for every row that is
-- written. The guard of each batch has read the instance in the same transaction.

-- row, tenant_id, instance_id and created_us never change once they are written.
CREATE TABLE instances (
    row INTEGER PRIMARY KEY,
    tenant_id TEXT NOT NULL,
    instance_id TEXT NOT NULL,
    workflow TEXT,
    definition_version TEXT,
    hosted INTEGER NOT NULL,
    status INTEGER NOT NULL,
    reason INTEGER,
    epoch INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    checkpoint_id TEXT,
    attempt INTEGER NOT NULL,
    max_attempts INTEGER NOT NULL,
    created_us INTEGER NOT NULL,
    started_us INTEGER,
    finished_us INTEGER,
    last_activity_us INTEGER NOT NULL,
    sleep_until_us INTEGER,
    deadline_us INTEGER,
    awaits_client_us INTEGER,
    cancelling_us INTEGER,
    intended INTEGER,
    compensation_state INTEGER NOT NULL,
    compensation_reason TEXT,
    exit_code INTEGER,
    peak_memory_bytes INTEGER,
    cpu_time_us INTEGER,
    due_us INTEGER AS (
        CASE WHEN status < 4
        THEN min(ifnull(sleep_until_us, deadline_us), ifnull(deadline_us, sleep_until_us)) END
    ) VIRTUAL
) STRICT;

CREATE UNIQUE INDEX instances_by_id ON instances (tenant_id, instance_id);
-- How lists go by these indexes stands in runtara/persistence/sqlite/indexes.py. Instances are made in the order
-- of their rows, but end in any order: so the indexes by finish hold what a walk may look for, and it does not
-- jump to and fro in the table.
CREATE INDEX instances_by_creation ON instances (created_us);
CREATE INDEX instances_by_status ON instances (status, created_us);
CREATE INDEX instances_by_finish ON instances (status, finished_us, row, workflow, created_us)
    WHERE finished_us IS NOT NULL;
CREATE INDEX instances_by_tenant ON instances (tenant_id, created_us);
CREATE INDEX instances_by_tenant_status ON instances (tenant_id, status, created_us);
CREATE INDEX instances_by_tenant_finish ON instances (tenant_id, status, finished_us, row, workflow, created_us)
    WHERE finished_us IS NOT NULL;
CREATE INDEX instances_by_workflow ON instances (tenant_id, workflow, status, created_us)
    WHERE workflow IS NOT NULL;
CREATE INDEX instances_awaiting ON instances (tenant_id, awaits_client_us) WHERE awaits_client_us IS NOT NULL;
CREATE INDEX instances_due ON instances (due_us) WHERE due_us IS NOT NULL;
CREATE INDEX instances_running ON instances (row, epoch) WHERE status = 2;
-- Those that neither time nor their client moves: they wait for a signal, or are stuck.
CREATE INDEX instances_unexplained ON instances (row)
    WHERE status IN (1, 3) AND sleep_until_us IS NULL AND awaits_client_us IS NULL;

CREATE TABLE checkpoints (
    id INTEGER PRIMARY KEY,
    instance INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    created_us INTEGER NOT NULL,
    checkpoint_id TEXT NOT NULL,
    state BLOB NOT NULL,
    UNIQUE (instance, revision),
    UNIQUE (instance, checkpoint_id)
) STRICT;

CREATE TABLE compensations (
    id INTEGER PRIMARY KEY,
    instance INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    checkpoint_id TEXT NOT NULL,
    step_id TEXT NOT NULL,
    "order" INTEGER NOT NULL,
    state INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    data BLOB NOT NULL,
    UNIQUE (instance, checkpoint_id)
) STRICT;

CREATE TABLE waits (
    id INTEGER PRIMARY KEY,
    instance INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    wait_id TEXT NOT NULL,
    kind INTEGER NOT NULL,
    key TEXT,
    deadline_us INTEGER,
    created_us INTEGER NOT NULL,
    outcome INTEGER,
    settled_us INTEGER,
    UNIQUE (instance, revision),
    UNIQUE (instance, wait_id)
) STRICT;

CREATE INDEX waits_open ON waits (instance, revision) WHERE outcome IS NULL;

CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    instance INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    type INTEGER NOT NULL,
    applied INTEGER NOT NULL,
    created_us INTEGER NOT NULL,
    subtype TEXT,
    checkpoint_id TEXT,
    scope_id TEXT,
    parent_scope_id TEXT,
    payload BLOB,
    UNIQUE (instance, revision)
) STRICT;

-- The inputs, outputs and errors of a step stay in its two events: revision and end_revision are theirs.
CREATE TABLE steps (
    id INTEGER PRIMARY KEY,
    instance INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    end_revision INTEGER,
    status INTEGER NOT NULL,
    started_us INTEGER NOT NULL,
    finished_us INTEGER,
    step_id TEXT NOT NULL,
    step_name TEXT,
    step_type TEXT,
    scope_id TEXT,
    parent_scope_id TEXT,
    UNIQUE (instance, revision)
) STRICT;

CREATE INDEX steps_running ON steps (instance, revision) WHERE status = 0;

CREATE TABLE signals (
    id INTEGER PRIMARY KEY,
    instance INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    type INTEGER NOT NULL,
    key TEXT,
    created_us INTEGER NOT NULL,
    epoch INTEGER,
    shown_us INTEGER,
    acknowledged_us INTEGER,
    payload BLOB,
    UNIQUE (instance, revision)
) STRICT;

CREATE INDEX signals_pending ON signals (instance, revision) WHERE acknowledged_us IS NULL;

CREATE TABLE retry_attempts (
    id INTEGER PRIMARY KEY,
    instance INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    checkpoint_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    created_us INTEGER NOT NULL,
    category INTEGER NOT NULL,
    severity INTEGER NOT NULL,
    retry_hint INTEGER NOT NULL,
    retry_after_us INTEGER,
    error_code TEXT,
    error TEXT,
    UNIQUE (instance, revision),
    UNIQUE (instance, checkpoint_id, attempt)
) STRICT;

CREATE TABLE errors (
    id INTEGER PRIMARY KEY,
    instance INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    checkpoint_id TEXT,
    step_id TEXT,
    code TEXT NOT NULL,
    category INTEGER NOT NULL,
    severity INTEGER NOT NULL,
    retry_hint INTEGER NOT NULL,
    retry_after_us INTEGER,
    cause_id INTEGER,
    created_us INTEGER NOT NULL,
    message TEXT NOT NULL,
    attributes TEXT,
    UNIQUE (instance, revision)
) STRICT;

CREATE TABLE compensation_attempts (
    id INTEGER PRIMARY KEY,
    instance INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    checkpoint_id TEXT NOT NULL,
    step_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    started_us INTEGER NOT NULL,
    finished_us INTEGER,
    success INTEGER,
    error_id INTEGER,
    error_message TEXT,
    UNIQUE (instance, revision),
    UNIQUE (instance, checkpoint_id, attempt)
) STRICT;

CREATE TABLE requests (
    id INTEGER PRIMARY KEY,
    instance INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    request_id TEXT NOT NULL,
    digest BLOB NOT NULL,
    answer TEXT NOT NULL,
    UNIQUE (instance, revision),
    UNIQUE (instance, request_id)
) STRICT;

CREATE TABLE payloads (
    id INTEGER PRIMARY KEY,
    instance INTEGER NOT NULL,
    kind INTEGER NOT NULL,
    data BLOB NOT NULL,
    UNIQUE (instance, kind)
) STRICT;
