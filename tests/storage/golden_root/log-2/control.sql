BEGIN TRANSACTION;
CREATE TABLE backends (name TEXT PRIMARY KEY, state TEXT NOT NULL, added_at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE cursors (
    run_id TEXT NOT NULL, consumer TEXT NOT NULL, seq INTEGER NOT NULL, at REAL NOT NULL, PRIMARY KEY (run_id, consumer)
) WITHOUT ROWID;
INSERT INTO "cursors" VALUES('r','primary',1,1.79537897812979197506e+09);
CREATE TABLE group_events (
    run_id TEXT NOT NULL, event_seq INTEGER NOT NULL, group_id INTEGER NOT NULL, event TEXT NOT NULL, kept INTEGER NOT NULL,
    reason TEXT NOT NULL, delivery_seq INTEGER NOT NULL, num_members INTEGER NOT NULL, num_valid INTEGER NOT NULL,
    min_version INTEGER NOT NULL, mean_reward REAL, at INTEGER NOT NULL,
    PRIMARY KEY (run_id, event_seq)
) WITHOUT ROWID;
INSERT INTO "group_events" VALUES('r',0,0,'decided',1,'informative',-1,2,2,0,0.5,1795378978095555);
INSERT INTO "group_events" VALUES('r',1,1,'decided',0,'all_equal',-1,2,2,0,1.0,1795378978095595);
INSERT INTO "group_events" VALUES('r',2,2,'decided',1,'informative',-1,2,2,0,0.5,1795378978095621);
INSERT INTO "group_events" VALUES('r',3,3,'decided',0,'all_equal',-1,2,2,0,1.0,1795378978095635);
INSERT INTO "group_events" VALUES('r',4,4,'decided',1,'informative',-1,2,2,0,0.5,1795378978095653);
INSERT INTO "group_events" VALUES('r',5,0,'delivered',1,'informative',0,2,2,0,0.5,1795378978101188);
CREATE TABLE groups (
    run_id TEXT NOT NULL, group_id INTEGER NOT NULL, key TEXT NOT NULL, digest TEXT NOT NULL, n INTEGER NOT NULL,
    first_rollout INTEGER NOT NULL, task_id TEXT NOT NULL, data_source TEXT NOT NULL, env TEXT NOT NULL, task TEXT NOT NULL,
    sampling TEXT NOT NULL, extra TEXT NOT NULL, accepted_at REAL NOT NULL, state TEXT NOT NULL, opened INTEGER NOT NULL,
    reason TEXT NOT NULL, num_valid INTEGER NOT NULL, mean_reward REAL, min_version INTEGER NOT NULL, delivery_seq INTEGER NOT NULL,
    PRIMARY KEY (run_id, group_id)
) WITHOUT ROWID;
INSERT INTO "groups" VALUES('r',0,'1a583a32301e5dcc1c5c92fd810b61a6','154d216b97add65e4a872aa1fbc80373',2,0,'t0','','noop','{"data":{},"data_source":"","env":"noop","prompt":"t0","task_id":"t0"}','{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":4096}','{}',1.79537897761678814888e+09,'acked',1,'informative',2,0.5,0,0);
INSERT INTO "groups" VALUES('r',1,'e203d2d59420f56e967bc94e4b904a76','ced829e5411f5e940728f639364a0334',2,2,'t1','','noop','{"data":{},"data_source":"","env":"noop","prompt":"t1","task_id":"t1"}','{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":4096}','{}',1.79537897761687231064e+09,'dropped',1,'all_equal',2,1.0,0,-1);
INSERT INTO "groups" VALUES('r',2,'2d6958887493f7c8c0e5bcea48ca4986','54a0cc5b6e4ca300e3584f0d9867700a',2,4,'t2','','noop','{"data":{},"data_source":"","env":"noop","prompt":"t2","task_id":"t2"}','{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":4096}','{}',1.79537897761689329147e+09,'kept',1,'informative',2,0.5,0,-1);
INSERT INTO "groups" VALUES('r',3,'95016d300dcd59253d61cbfda78b605d','4f4aa62b970369838f42e56d62726e92',2,6,'t3','','noop','{"data":{},"data_source":"","env":"noop","prompt":"t3","task_id":"t3"}','{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":4096}','{}',1.7953789776169142723e+09,'dropped',1,'all_equal',2,1.0,0,-1);
INSERT INTO "groups" VALUES('r',4,'66921875b370ddf46e1bf5142ccbf28e','8f61cb0dff8ef5ae9470834fcc95266f',2,8,'t4','','noop','{"data":{},"data_source":"","env":"noop","prompt":"t4","task_id":"t4"}','{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":4096}','{}',1.79537897761693239213e+09,'kept',1,'informative',2,0.5,0,-1);
INSERT INTO "groups" VALUES('r',5,'494e64d7c8343a4fdcdd953f7be6584d','495f610585491bc694a0152e6da2c841',2,10,'late0','','noop','{"data":{},"data_source":"","env":"noop","prompt":"late0","task_id":"late0"}','{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":4096}','{}',1.79537898015356969837e+09,'open',0,'',0,NULL,-1,-1);
INSERT INTO "groups" VALUES('r',6,'cc1fac7851fc65d3b7c3188a2f9751db','11f6affb44bbda2a2ff8b74b2396f8d2',2,12,'late1','','noop','{"data":{},"data_source":"","env":"noop","prompt":"late1","task_id":"late1"}','{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":4096}','{}',1.79537898015362691874e+09,'open',0,'',0,NULL,-1,-1);
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "meta" VALUES('version','2');
CREATE TABLE parts (
    run_id TEXT NOT NULL, commit_seq INTEGER NOT NULL, part TEXT NOT NULL, files TEXT NOT NULL, published INTEGER NOT NULL,
    PRIMARY KEY (run_id, commit_seq)
) WITHOUT ROWID;
INSERT INTO "parts" VALUES('r',1,'part-2f5593205a6b4575','[{"table":"sequences","path":"sequences/part-2f5593205a6b4575.parquet","rows":10,"bytes":7671,"sha256":"89553cb695f56b05d3aa2daa5b6ca9fb245eaa0643d900cb0cbc2d7456867da4"},{"table":"rollouts","path":"rollouts/part-2f5593205a6b4575.parquet","rows":10,"bytes":10389,"sha256":"aaabb08adae0ffccab520a7e593d4047593f6e5f0edab1ae66c883fa4ba7e42f"},{"table":"turns","path":"turns/part-2f5593205a6b4575.parquet","rows":20,"bytes":4255,"sha256":"c43d53e0b6faacce66ce3db507600d39af608b9417040a066cebdf569aeba0a4"},{"table":"messages","path":"messages/part-2f5593205a6b4575.parquet","rows":20,"bytes":2696,"sha256":"f2a9a664ffca0a5273033946af0c3ee4e4a8ccac417490192f9daf29ebffbc69"},{"table":"tasks","path":"tasks/part-2f5593205a6b4575.parquet","rows":5,"bytes":3235,"sha256":"d3f35e6fa75b3fdb90803a503dc5b8704e541d2186d663cdd5805abf3fdbe967"}]',1);
INSERT INTO "parts" VALUES('r',2,'part-3e73caf6f8974c58','[{"table":"groups","path":"groups/part-3e73caf6f8974c58.parquet","rows":6,"bytes":3595,"sha256":"ed564714582913460cb64627dffa131bbaff7a1efc52e2ed6ad3b38636288cd2"}]',1);
CREATE TABLE rollouts (
    run_id TEXT NOT NULL, rollout_id INTEGER NOT NULL, group_id INTEGER NOT NULL, sample_index INTEGER NOT NULL,
    state TEXT NOT NULL, attempt INTEGER NOT NULL, infra_failures INTEGER NOT NULL, worker_losses INTEGER NOT NULL,
    code TEXT NOT NULL, cancel_code TEXT NOT NULL, message TEXT NOT NULL, backend TEXT NOT NULL, reward REAL, part TEXT NOT NULL,
    min_version INTEGER NOT NULL, max_version INTEGER NOT NULL, num_turns INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
    num_sampled INTEGER NOT NULL,
    PRIMARY KEY (run_id, rollout_id)
) WITHOUT ROWID;
INSERT INTO "rollouts" VALUES('r',0,0,0,'completed',1,0,0,'','','','scripted:oracle',0.0,'part-2f5593205a6b4575',0,1,2,20,10);
INSERT INTO "rollouts" VALUES('r',1,0,1,'completed',1,0,0,'','','','scripted:oracle',1.0,'part-2f5593205a6b4575',0,1,2,20,10);
INSERT INTO "rollouts" VALUES('r',2,1,0,'completed',1,0,0,'','','','scripted:oracle',1.0,'part-2f5593205a6b4575',0,1,2,20,10);
INSERT INTO "rollouts" VALUES('r',3,1,1,'completed',1,0,0,'','','','scripted:oracle',1.0,'part-2f5593205a6b4575',0,1,2,20,10);
INSERT INTO "rollouts" VALUES('r',4,2,0,'completed',1,0,0,'','','','scripted:oracle',0.0,'part-2f5593205a6b4575',0,1,2,20,10);
INSERT INTO "rollouts" VALUES('r',5,2,1,'completed',1,0,0,'','','','scripted:oracle',1.0,'part-2f5593205a6b4575',0,1,2,20,10);
INSERT INTO "rollouts" VALUES('r',6,3,0,'completed',1,0,0,'','','','scripted:oracle',1.0,'part-2f5593205a6b4575',0,1,2,20,10);
INSERT INTO "rollouts" VALUES('r',7,3,1,'completed',1,0,0,'','','','scripted:oracle',1.0,'part-2f5593205a6b4575',0,1,2,20,10);
INSERT INTO "rollouts" VALUES('r',8,4,0,'completed',1,0,0,'','','','scripted:oracle',0.0,'part-2f5593205a6b4575',0,1,2,20,10);
INSERT INTO "rollouts" VALUES('r',9,4,1,'completed',1,0,0,'','','','scripted:oracle',1.0,'part-2f5593205a6b4575',0,1,2,20,10);
INSERT INTO "rollouts" VALUES('r',10,5,0,'queued',0,0,0,'','','','',NULL,'',-1,-1,0,0,0);
INSERT INTO "rollouts" VALUES('r',11,5,1,'queued',0,0,0,'','','','',NULL,'',-1,-1,0,0,0);
INSERT INTO "rollouts" VALUES('r',12,6,0,'queued',0,0,0,'','','','',NULL,'',-1,-1,0,0,0);
INSERT INTO "rollouts" VALUES('r',13,6,1,'queued',0,0,0,'','','','',NULL,'',-1,-1,0,0,0);
CREATE TABLE runs (
    run_id TEXT PRIMARY KEY, config TEXT NOT NULL, digest TEXT NOT NULL, state TEXT NOT NULL, last INTEGER NOT NULL,
    cancelled INTEGER NOT NULL, tasks_stored INTEGER NOT NULL, events_stored INTEGER NOT NULL,
    created_at REAL NOT NULL, started_at REAL NOT NULL, finished_at REAL NOT NULL
) WITHOUT ROWID;
INSERT INTO "runs" VALUES('r','{"run_id":"r","filter":"dapo","delivery":"stream","agent":"native","seed":0,"sampling":{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":4096},"limits":{"init_s":60.0,"run_s":300.0,"eval_s":120.0,"queue_s":3600.0,"tool_s":30.0,"max_turns":16,"max_tokens":16384,"max_attempts":3,"max_worker_losses":10},"backends":[],"target_groups":0,"max_open_groups":256,"max_unacked_groups":256,"max_staleness":-1}','9b69421278059425900a480980c6ce5c','open',0,0,5,6,1795378977.10226,1.79537897761718726161e+09,0.0);
CREATE TABLE versions (
    run_id TEXT NOT NULL, version INTEGER NOT NULL, note TEXT NOT NULL, at REAL NOT NULL, published INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (run_id, version)
) WITHOUT ROWID;
CREATE UNIQUE INDEX groups_key ON groups (run_id, key);
CREATE UNIQUE INDEX groups_delivery ON groups (run_id, delivery_seq) WHERE delivery_seq >= 0;
CREATE INDEX rollouts_unstored ON rollouts (run_id, group_id) WHERE part = '';
CREATE UNIQUE INDEX parts_name ON parts (run_id, part);
COMMIT;