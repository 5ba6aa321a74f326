BEGIN TRANSACTION;
CREATE TABLE backends (
    name TEXT PRIMARY KEY, state TEXT NOT NULL, added_at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE cursors (
    run_id TEXT NOT NULL, consumer TEXT NOT NULL, seq INTEGER NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (run_id, consumer)
) WITHOUT ROWID;
CREATE TABLE dataset (
    run_id TEXT NOT NULL, place INTEGER NOT NULL, key TEXT NOT NULL, digest TEXT NOT NULL,
    n INTEGER NOT NULL, task_id TEXT NOT NULL, data_source TEXT NOT NULL, env TEXT NOT NULL,
    task TEXT NOT NULL, sampling TEXT NOT NULL, extra TEXT NOT NULL, resting INTEGER NOT NULL,
    PRIMARY KEY (run_id, place)
) WITHOUT ROWID;
CREATE TABLE groups (
    run_id TEXT NOT NULL, group_id INTEGER NOT NULL, key TEXT NOT NULL, digest TEXT NOT NULL,
    n INTEGER NOT NULL,
    first_rollout INTEGER NOT NULL, task_id TEXT NOT NULL, data_source TEXT NOT NULL,
    env TEXT NOT NULL, task TEXT NOT NULL,
    sampling TEXT NOT NULL, extra TEXT NOT NULL, accepted_at REAL NOT NULL, state TEXT NOT NULL,
    opened INTEGER NOT NULL,
    reason TEXT NOT NULL, num_valid INTEGER NOT NULL, mean_reward REAL,
    min_version INTEGER NOT NULL, delivery_seq INTEGER NOT NULL,
    PRIMARY KEY (run_id, group_id)
) WITHOUT ROWID;
INSERT INTO "groups" VALUES('r',0,'1a583a32301e5dcc1c5c92fd810b61a6','7c2172581e64655b4cf3e75be5b8e238',2,0,'t0','','noop','{"data":{},"data_source":"","env":"noop","prompt":"t0","task_id":"t0"}','{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":4096,"priority":0}','{}',1.7959606946530621052e+09,'kept',1,'informative',2,0.5,0,-1);
INSERT INTO "groups" VALUES('r',1,'e203d2d59420f56e967bc94e4b904a76','cf850d9c950ea7ea388ee60ab9960de0',2,2,'t1','','noop','{"data":{},"data_source":"","env":"noop","prompt":"t1","task_id":"t1"}','{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":4096,"priority":0}','{}',1.79596069465315914155e+09,'dropped',1,'all_equal',2,1.0,0,-1);
INSERT INTO "groups" VALUES('r',2,'2d6958887493f7c8c0e5bcea48ca4986','84c207b0142d06de6b12209ed97098fa',2,4,'t2','','noop','{"data":{},"data_source":"","env":"noop","prompt":"t2","task_id":"t2"}','{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":4096,"priority":0}','{}',1.79596069465319085117e+09,'kept',1,'informative',2,0.5,0,-1);
INSERT INTO "groups" VALUES('r',3,'95016d300dcd59253d61cbfda78b605d','c3b087d1f5f9fe44c640b6f6d8bad8b6',2,6,'t3','','noop','{"data":{},"data_source":"","env":"noop","prompt":"t3","task_id":"t3"}','{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":4096,"priority":0}','{}',1.795960694653222084e+09,'dropped',1,'all_equal',2,1.0,0,-1);
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "meta" VALUES('owner','d934115cd2414959a876a236ae1d0060');
INSERT INTO "meta" VALUES('prorl','0.1.0');
INSERT INTO "meta" VALUES('version','4');
CREATE TABLE outbox (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, kind TEXT NOT NULL,
    ref INTEGER NOT NULL, payload TEXT NOT NULL
);
CREATE TABLE parts (
    run_id TEXT NOT NULL, commit_seq INTEGER NOT NULL, part TEXT NOT NULL, files TEXT NOT NULL,
    published INTEGER NOT NULL,
    PRIMARY KEY (run_id, commit_seq)
) WITHOUT ROWID;
INSERT INTO "parts" VALUES('r',1,'part-f58996e7a2b749a8','[{"table":"sequences","path":"sequences/part-f58996e7a2b749a8.parquet","rows":8,"bytes":7097,"sha256":"81e9974d17240dda7350f388c75aca727c0ed09704caf5bab1588d2a7fbe674c","first":0,"last":7},{"table":"rollouts","path":"rollouts/part-f58996e7a2b749a8.parquet","rows":8,"bytes":17258,"sha256":"a00d98f50a4fdd97acb4bbed9886add92dc11bc9e2bb6ecc8e11632c8c689ea9","first":0,"last":7},{"table":"turns","path":"turns/part-f58996e7a2b749a8.parquet","rows":16,"bytes":5124,"sha256":"7cf3b3db80fb9f3516612d4e6261dd8aaddf875986329821fe2c971bc6c38ce3","first":0,"last":7},{"table":"tasks","path":"tasks/part-f58996e7a2b749a8.parquet","rows":4,"bytes":3635,"sha256":"c2febaa66cf09b3f7e98d4bef6909d5ed2c4158e11c0b8de9a7bdd32b37aa886","first":-1,"last":-1}]',1);
INSERT INTO "parts" VALUES('r',2,'part-bd70732390034ac9','[{"table":"groups","path":"groups/part-bd70732390034ac9.parquet","rows":4,"bytes":3771,"sha256":"0070629b429defcc007ab40ae5031fff74e1794b09e0792391b33041afcae8cb","first":-1,"last":-1}]',1);
CREATE TABLE rollouts (
    run_id TEXT NOT NULL, rollout_id INTEGER NOT NULL, group_id INTEGER NOT NULL,
    sample_index INTEGER NOT NULL,
    state TEXT NOT NULL, attempt INTEGER NOT NULL, infra_failures INTEGER NOT NULL,
    worker_losses INTEGER NOT NULL,
    code TEXT NOT NULL, cancel_code TEXT NOT NULL, message TEXT NOT NULL, backend TEXT NOT NULL,
    reward REAL, part TEXT NOT NULL,
    min_version INTEGER NOT NULL, max_version INTEGER NOT NULL, num_turns INTEGER NOT NULL, num_tokens INTEGER NOT NULL, num_sampled INTEGER NOT NULL, num_trained INTEGER NOT NULL,
    PRIMARY KEY (run_id, rollout_id)
) WITHOUT ROWID;
INSERT INTO "rollouts" VALUES('r',0,0,0,'completed',1,0,0,'','','','scripted:oracle',0.0,'part-f58996e7a2b749a8',0,1,2,20,10,10);
INSERT INTO "rollouts" VALUES('r',1,0,1,'completed',1,0,0,'','','','scripted:oracle',1.0,'part-f58996e7a2b749a8',0,1,2,20,10,10);
INSERT INTO "rollouts" VALUES('r',2,1,0,'completed',1,0,0,'','','','scripted:oracle',1.0,'part-f58996e7a2b749a8',0,1,2,20,10,10);
INSERT INTO "rollouts" VALUES('r',3,1,1,'completed',1,0,0,'','','','scripted:oracle',1.0,'part-f58996e7a2b749a8',0,1,2,20,10,10);
INSERT INTO "rollouts" VALUES('r',4,2,0,'completed',1,0,0,'','','','scripted:oracle',0.0,'part-f58996e7a2b749a8',0,1,2,20,10,10);
INSERT INTO "rollouts" VALUES('r',5,2,1,'completed',1,0,0,'','','','scripted:oracle',1.0,'part-f58996e7a2b749a8',0,1,2,20,10,10);
INSERT INTO "rollouts" VALUES('r',6,3,0,'completed',1,0,0,'','','','scripted:oracle',1.0,'part-f58996e7a2b749a8',0,1,2,20,10,10);
INSERT INTO "rollouts" VALUES('r',7,3,1,'completed',1,0,0,'','','','scripted:oracle',1.0,'part-f58996e7a2b749a8',0,1,2,20,10,10);
CREATE TABLE runs (
    run_id TEXT PRIMARY KEY, config TEXT NOT NULL, state TEXT NOT NULL,
    last INTEGER NOT NULL,
    cancelled INTEGER NOT NULL,
    created_at REAL NOT NULL, started_at REAL NOT NULL, finished_at REAL NOT NULL,
    counters TEXT NOT NULL, wanted INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO "runs" VALUES('r','{"run_id":"r","filter":"dapo","delivery":"stream","agent":"native","renderer":{"model":"","name":"","family":"","variables":{},"date":"","on_history_rewrite":"append","allow_unrendered_tools":false},"env":{},"tools":[],"system_message":false,"seed":0,"sampling":{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":4096},"limits":{"init_s":60.0,"run_s":300.0,"eval_s":120.0,"queue_s":3600.0,"tool_s":30.0,"max_turns":16,"max_tokens":16384,"max_attempts":3,"max_worker_losses":10,"artifact_mb":64},"backends":[],"target_groups":0,"max_open_groups":256,"max_uncommitted_groups":256,"epochs":0,"server_priority":false,"groups_per_step":0,"early_stop_valid":0,"straggler_grace_s":60.0,"max_staleness":-1,"skip_invalid":false,"journal":"node","on_lost_tool_call":"report","train":["main","compacted"],"routed_experts":false,"track":[]}','finished',1,0,1.7959606946377289295e+09,1.79596069465340685842e+09,1.79596069522366333015e+09,'{"life":{"paused":false,"problem":""},"accepted":{"next_group":4,"next_rollout":8,"group_size":2},"progress":{"states":{"completed":8},"num_started":4},"decisions":{"states":{"kept":2,"dropped":2},"drop_reasons":{"all_equal":2},"next_event":4},"commits":{"next_commit":3,"num_rows":8,"stored_bytes":36885,"num_rewards":8,"reward_sum":6.0},"outbox":{"end":12,"stored":12},"delivery":{"next_delivery":0,"committed":0,"trained":0,"kept":2,"waiting":2},"weights":{"version":0,"allocated_version":0},"dataset":{"num_tasks":0,"fed":0,"skipped":0},"pace":{"rate":[1.9844207167625427,3.9766234755516052],"group_s":0.2356459876122972,"handout_interval_s":0.0}}',1);
CREATE TABLE versions (
    run_id TEXT NOT NULL, version INTEGER NOT NULL, note TEXT NOT NULL, at REAL NOT NULL,
    published INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (run_id, version)
) WITHOUT ROWID;
CREATE INDEX runs_wanted ON runs (created_at) WHERE wanted = 1;
CREATE UNIQUE INDEX groups_key ON groups (run_id, key);
CREATE UNIQUE INDEX groups_delivery ON groups (run_id, delivery_seq) WHERE delivery_seq >= 0;
CREATE INDEX groups_started ON groups (run_id, group_id) WHERE state = 'open' AND opened = 1;
CREATE INDEX groups_pooled ON groups (run_id, group_id) WHERE state = 'open' AND opened = 0;
CREATE UNIQUE INDEX dataset_key ON dataset (run_id, key);
CREATE UNIQUE INDEX parts_name ON parts (run_id, part);
CREATE INDEX parts_unpublished ON parts (run_id, commit_seq) WHERE published = 0;
CREATE INDEX outbox_run ON outbox (run_id, seq);
CREATE INDEX outbox_complete ON outbox (run_id, ref) WHERE kind = 'group_complete';
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('outbox',12);
COMMIT;
