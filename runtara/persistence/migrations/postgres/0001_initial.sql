-- The first layout. Times are microseconds of UTC, words are their numbers (see runtara/records.py). Texts are
-- escaped for NUL and compare by code point (see runtara/persistence/postgres/values.py).
--
-- Every key of a table of history begins with the instance, so that each can be partitioned by hash of it
-- (docs/postgres.md). They refer to instances without foreign keys: those would cost a lock on the instance
-- for every row written. The guard of each batch has read the instance in the same transaction, and its one
-- writer is fenced by the lease.

CREATE TABLE meta (
    one smallint PRIMARY KEY CHECK (one = 1),
    version integer NOT NULL,
    next_number bigint NOT NULL
);

INSERT INTO meta (one, version, next_number) VALUES (1, 0, 1);

CREATE TABLE notes (
    name text COLLATE "C" PRIMARY KEY,
    text text COLLATE "C" NOT NULL
);

-- Instances that were purged and whose history is not yet swept.
CREATE TABLE purged (
    "row" bigint PRIMARY KEY
);

-- Who may write. Room in the page keeps its updates, one per batch, out of the index.
CREATE TABLE runtimes (
    slot smallint PRIMARY KEY CHECK (slot = 1),
    epoch bigint NOT NULL,
    batch bigint NOT NULL,
    owner text COLLATE "C",
    machine text COLLATE "C",
    host text COLLATE "C",
    pid bigint,
    since timestamptz,
    expires timestamptz
) WITH (fillfactor = 10);

INSERT INTO runtimes (slot, epoch, batch) VALUES (1, 0, 0);

-- row, tenant_id, instance_id and created_us never change once they are written.
CREATE TABLE instances (
    "row" bigint PRIMARY KEY,
    epoch bigint NOT NULL,
    revision bigint NOT NULL,
    attempt bigint NOT NULL,
    max_attempts bigint NOT NULL,
    created_us bigint NOT NULL,
    started_us bigint,
    finished_us bigint,
    last_activity_us bigint NOT NULL,
    sleep_until_us bigint,
    deadline_us bigint,
    awaits_client_us bigint,
    cancelling_us bigint,
    exit_code bigint,
    peak_memory_bytes bigint,
    cpu_time_us bigint,
    due_us bigint GENERATED ALWAYS AS (
        CASE WHEN status < 4 THEN least(sleep_until_us, deadline_us) END
    ) STORED,
    hosted smallint NOT NULL,
    status smallint NOT NULL,
    reason smallint,
    intended smallint,
    compensation_state smallint NOT NULL,
    tenant_id text COLLATE "C" NOT NULL,
    instance_id text COLLATE "C" NOT NULL,
    workflow text COLLATE "C",
    definition_version text COLLATE "C",
    checkpoint_id text COLLATE "C",
    compensation_reason text COLLATE "C",
    -- What stands for the tenant in indexes: both ids together may be longer than an index takes.
    tenant_digest bytea NOT NULL
        GENERATED ALWAYS AS (sha256(decode(replace(tenant_id, E'\\', E'\\\\'), 'escape'))) STORED,
    UNIQUE (tenant_digest, instance_id)
) WITH (fillfactor = 80);

CREATE INDEX instances_by_creation ON instances (created_us, "row");
CREATE INDEX instances_by_status ON instances (status, created_us, "row");
CREATE INDEX instances_by_finish ON instances (status, finished_us, "row") WHERE finished_us IS NOT NULL;
CREATE INDEX instances_by_tenant ON instances (tenant_digest, created_us, "row");
CREATE INDEX instances_by_tenant_status ON instances (tenant_digest, status, created_us, "row");
CREATE INDEX instances_by_tenant_finish ON instances (tenant_digest, status, finished_us, "row")
    WHERE finished_us IS NOT NULL;
CREATE INDEX instances_by_workflow ON instances (tenant_digest, workflow, status, created_us, "row")
    WHERE workflow IS NOT NULL;
CREATE INDEX instances_awaiting ON instances (tenant_digest, created_us, "row")
    WHERE awaits_client_us IS NOT NULL;
CREATE INDEX instances_due ON instances (due_us, "row") WHERE due_us IS NOT NULL;
CREATE INDEX instances_running ON instances ("row", epoch) WHERE status = 2;
-- Those that neither time nor their client moves: they wait for a signal, or are stuck.
CREATE INDEX instances_unexplained ON instances ("row")
    WHERE status IN (1, 3) AND sleep_until_us IS NULL AND awaits_client_us IS NULL;

CREATE TABLE checkpoints (
    instance bigint NOT NULL,
    revision bigint NOT NULL,
    created_us bigint NOT NULL,
    checkpoint_id text COLLATE "C" NOT NULL,
    state bytea NOT NULL,
    PRIMARY KEY (instance, revision),
    UNIQUE (instance, checkpoint_id)
);

CREATE TABLE compensations (
    instance bigint NOT NULL,
    revision bigint NOT NULL,
    "order" bigint NOT NULL,
    attempts bigint NOT NULL,
    state smallint NOT NULL,
    checkpoint_id text COLLATE "C" NOT NULL,
    step_id text COLLATE "C" NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (instance, checkpoint_id)
) WITH (fillfactor = 90);

CREATE TABLE waits (
    instance bigint NOT NULL,
    revision bigint NOT NULL,
    deadline_us bigint,
    created_us bigint NOT NULL,
    settled_us bigint,
    kind smallint NOT NULL,
    outcome smallint,
    wait_id text COLLATE "C" NOT NULL,
    key text COLLATE "C",
    PRIMARY KEY (instance, revision),
    UNIQUE (instance, wait_id)
) WITH (fillfactor = 90);

CREATE INDEX waits_open ON waits (instance, revision) WHERE outcome IS NULL;

CREATE TABLE events (
    instance bigint NOT NULL,
    revision bigint NOT NULL,
    created_us bigint NOT NULL,
    type smallint NOT NULL,
    applied smallint NOT NULL,
    subtype text COLLATE "C",
    checkpoint_id text COLLATE "C",
    scope_id text COLLATE "C",
    parent_scope_id text COLLATE "C",
    payload bytea,
    PRIMARY KEY (instance, revision)
);

-- The inputs, outputs and errors of a step stay in its two events: revision and end_revision are theirs.
CREATE TABLE steps (
    instance bigint NOT NULL,
    revision bigint NOT NULL,
    end_revision bigint,
    started_us bigint NOT NULL,
    finished_us bigint,
    status smallint NOT NULL,
    step_id text COLLATE "C" NOT NULL,
    step_name text COLLATE "C",
    step_type text COLLATE "C",
    scope_id text COLLATE "C",
    parent_scope_id text COLLATE "C",
    PRIMARY KEY (instance, revision)
) WITH (fillfactor = 90);

CREATE INDEX steps_running ON steps (instance, revision) WHERE status = 0;

CREATE TABLE signals (
    instance bigint NOT NULL,
    revision bigint NOT NULL,
    created_us bigint NOT NULL,
    epoch bigint,
    shown_us bigint,
    acknowledged_us bigint,
    type smallint NOT NULL,
    key text COLLATE "C",
    payload bytea,
    PRIMARY KEY (instance, revision)
) WITH (fillfactor = 90);

CREATE INDEX signals_pending ON signals (instance, revision) WHERE acknowledged_us IS NULL;

CREATE TABLE retry_attempts (
    instance bigint NOT NULL,
    revision bigint NOT NULL,
    attempt bigint NOT NULL,
    created_us bigint NOT NULL,
    retry_after_us bigint,
    category smallint NOT NULL,
    severity smallint NOT NULL,
    retry_hint smallint NOT NULL,
    checkpoint_id text COLLATE "C" NOT NULL,
    error_code text COLLATE "C",
    error text COLLATE "C",
    PRIMARY KEY (instance, revision),
    UNIQUE (instance, checkpoint_id, attempt)
);

CREATE TABLE errors (
    instance bigint NOT NULL,
    revision bigint NOT NULL,
    created_us bigint NOT NULL,
    retry_after_us bigint,
    cause_id bigint,
    category smallint NOT NULL,
    severity smallint NOT NULL,
    retry_hint smallint NOT NULL,
    checkpoint_id text COLLATE "C",
    step_id text COLLATE "C",
    code text COLLATE "C" NOT NULL,
    message text COLLATE "C" NOT NULL,
    attributes text COLLATE "C",
    PRIMARY KEY (instance, revision)
);

CREATE TABLE compensation_attempts (
    instance bigint NOT NULL,
    revision bigint NOT NULL,
    attempt bigint NOT NULL,
    started_us bigint NOT NULL,
    finished_us bigint,
    error_id bigint,
    success smallint,
    checkpoint_id text COLLATE "C" NOT NULL,
    step_id text COLLATE "C" NOT NULL,
    error_message text COLLATE "C",
    PRIMARY KEY (instance, revision),
    UNIQUE (instance, checkpoint_id, attempt)
);

CREATE TABLE requests (
    instance bigint NOT NULL,
    revision bigint NOT NULL,
    request_id text COLLATE "C" NOT NULL,
    digest bytea NOT NULL,
    answer text COLLATE "C" NOT NULL,
    PRIMARY KEY (instance, revision),
    UNIQUE (instance, request_id)
);

CREATE TABLE payloads (
    instance bigint NOT NULL,
    kind smallint NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (instance, kind)
);
