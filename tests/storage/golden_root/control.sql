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
INSERT INTO "groups" VALUES('r',0,'1a583a32301e5dcc1c5c92fd810b61a6','7c2172581e64655b4cf3e75be5b8e238',2,0,'t0','','noop','{"data":{},"data_source":"","env":"noop","prompt":"t0","task_id":"t0"}','{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":4096,"priority":0}','{}',1.79590980673858380319e+09,'kept',1,'informative',2,0.5,0,-1);
INSERT INTO "groups" VALUES('r',1,'e203d2d59420f56e967bc94e4b904a76','cf850d9c950ea7ea388ee60ab9960de0',2,2,'t1','','noop','{"data":{},"data_source":"","env":"noop","prompt":"t1","task_id":"t1"}','{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":4096,"priority":0}','{}',1.79590980673873901367e+09,'dropped',1,'all_equal',2,1.0,0,-1);
INSERT INTO "groups" VALUES('r',2,'2d6958887493f7c8c0e5bcea48ca4986','84c207b0142d06de6b12209ed97098fa',2,4,'t2','','noop','{"data":{},"data_source":"","env":"noop","prompt":"t2","task_id":"t2"}','{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":4096,"priority":0}','{}',1.79590980673880267143e+09,'kept',1,'informative',2,0.5,0,-1);
INSERT INTO "groups" VALUES('r',3,'95016d300dcd59253d61cbfda78b605d','c3b087d1f5f9fe44c640b6f6d8bad8b6',2,6,'t3','','noop','{"data":{},"data_source":"","env":"noop","prompt":"t3","task_id":"t3"}','{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":4096,"priority":0}','{}',1.79590980673884701725e+09,'dropped',1,'all_equal',2,1.0,0,-1);
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "meta" VALUES('owner','bbae21c4f7414084ae1fed16ae3b7225');
INSERT INTO "meta" VALUES('prorl','0.1.0');
INSERT INTO "meta" VALUES('version','3');
CREATE TABLE outbox (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, kind TEXT NOT NULL,
    ref INTEGER NOT NULL, payload TEXT NOT NULL
);
CREATE TABLE parts (
    run_id TEXT NOT NULL, commit_seq INTEGER NOT NULL, part TEXT NOT NULL, files TEXT NOT NULL,
    published INTEGER NOT NULL,
    PRIMARY KEY (run_id, commit_seq)
) WITHOUT ROWID;
INSERT INTO "parts" VALUES('r',1,'part-bbce3d613d29447e','[{"table":"sequences","path":"sequences/part-bbce3d613d29447e.parquet","rows":8,"bytes":7097,"sha256":"aac9ffc817af5a9672209024402a74ab5c0ed4eb9b4ba326f8009f7a2b1842e9","first":0,"last":7},{"table":"rollouts","path":"rollouts/part-bbce3d613d29447e.parquet","rows":8,"bytes":17258,"sha256":"bba15ef6305b04bb0df5fb094ff6845d55ee1657fff6117036e8c05494040262","first":0,"last":7},{"table":"turns","path":"turns/part-bbce3d613d29447e.parquet","rows":16,"bytes":5124,"sha256":"fe63bb511c728e7235cb4383bf64736543abdf25a597a0caa8486055abc4942f","first":0,"last":7},{"table":"tasks","path":"tasks/part-bbce3d613d29447e.parquet","rows":4,"bytes":3635,"sha256":"f26f97559cc6a49851774ba7a4e0db1e8974c1b9ab220c442af8309c4e9a4059","first":-1,"last":-1}]',1);
INSERT INTO "parts" VALUES('r',2,'part-b790c89ab3a74fae','[{"table":"groups","path":"groups/part-b790c89ab3a74fae.parquet","rows":4,"bytes":3771,"sha256":"27bd227e5c2bcc3147e25fcb4af6dc0e6a44e2cb6292202763c6876bc4b99b62","first":-1,"last":-1}]',1);
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
INSERT INTO "rollouts" VALUES('r',0,0,0,'completed',1,0,0,'','','','scripted:oracle',0.0,'part-bbce3d613d29447e',0,1,2,20,10,10);
INSERT INTO "rollouts" VALUES('r',1,0,1,'completed',1,0,0,'','','','scripted:oracle',1.0,'part-bbce3d613d29447e',0,1,2,20,10,10);
INSERT INTO "rollouts" VALUES('r',2,1,0,'completed',1,0,0,'','','','scripted:oracle',1.0,'part-bbce3d613d29447e',0,1,2,20,10,10);
INSERT INTO "rollouts" VALUES('r',3,1,1,'completed',1,0,0,'','','','scripted:oracle',1.0,'part-bbce3d613d29447e',0,1,2,20,10,10);
INSERT INTO "rollouts" VALUES('r',4,2,0,'completed',1,0,0,'','','','scripted:oracle',0.0,'part-bbce3d613d29447e',0,1,2,20,10,10);
INSERT INTO "rollouts" VALUES('r',5,2,1,'completed',1,0,0,'','','','scripted:oracle',1.0,'part-bbce3d613d29447e',0,1,2,20,10,10);
INSERT INTO "rollouts" VALUES('r',6,3,0,'completed',1,0,0,'','','','scripted:oracle',1.0,'part-bbce3d613d29447e',0,1,2,20,10,10);
INSERT INTO "rollouts" VALUES('r',7,3,1,'completed',1,0,0,'','','','scripted:oracle',1.0,'part-bbce3d613d29447e',0,1,2,20,10,10);
CREATE TABLE runs (
    run_id TEXT PRIMARY KEY, config TEXT NOT NULL, state TEXT NOT NULL,
    last INTEGER NOT NULL,
    cancelled INTEGER NOT NULL,
    created_at REAL NOT NULL, started_at REAL NOT NULL, finished_at REAL NOT NULL,
    counters TEXT NOT NULL, wanted INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO "runs" VALUES('r','{"run_id":"r","filter":"dapo","delivery":"stream","agent":"native","renderer":{"model":"","name":"","family":"","variables":{},"date":"","on_history_rewrite":"append","allow_unrendered_tools":false},"env":{},"tools":[],"system_message":false,"seed":0,"sampling":{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":4096},"limits":{"init_s":60.0,"run_s":300.0,"eval_s":120.0,"queue_s":3600.0,"tool_s":30.0,"max_turns":16,"max_tokens":16384,"max_attempts":3,"max_worker_losses":10,"artifact_mb":64},"backends":[],"target_groups":0,"max_open_groups":256,"max_unacked_groups":256,"epochs":0,"server_priority":false,"groups_per_step":0,"early_stop_valid":0,"straggler_grace_s":60.0,"max_staleness":-1,"skip_invalid":false,"journal":"node","on_lost_tool_call":"report","train":["main","compacted"],"routed_experts":false,"track":[]}','finished',1,0,1.79590980656671476362e+09,1.795909806739102602e+09,1.79590980982000064853e+09,'{"life":{"paused":false,"problem":""},"accepted":{"next_group":4,"next_rollout":8,"group_size":2},"progress":{"states":{"completed":8},"num_started":4},"decisions":{"states":{"kept":2,"dropped":2},"drop_reasons":{"all_equal":2},"next_event":4},"commits":{"next_commit":3,"num_rows":8,"stored_bytes":36885,"num_rewards":8,"reward_sum":6.0},"outbox":{"end":12,"stored":12},"delivery":{"next_delivery":0,"acked":0,"trained":0,"kept":2,"waiting":2},"weights":{"version":0,"allocated_version":0},"dataset":{"num_tasks":0,"fed":0,"skipped":0},"pace":{"rate":[1.9844207167625427,3.9766234755516052],"group_s":2.811347590647238,"handout_interval_s":0.0}}',1);
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
