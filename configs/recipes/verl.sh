#!/usr/bin/env bash
# verl (V1) over a recipe's run: PRORL_URL=prorl-runs PRORL_RUN=math bash configs/recipes/verl.sh Qwen3-4B prompts.parquet trained/math
# verl draws prompts of its own file and gets the run's next groups for them: any rows will do.
set -euo pipefail
model=$1 prompts=$2 output=$3
shift 3
exec python -m verl.trainer.main_ppo \
  trainer.v1.trainer_mode=sync trainer.val_before_train=False trainer.test_freq=-1 \
  +actor_rollout_ref.rollout.agent.agent_loop_manager_class=prorl.trainer.adapters.verl.Manager \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.calculate_log_probs=True \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.temperature=1.0 \
  algorithm.adv_estimator=grpo \
  algorithm.rollout_correction.bypass_mode=True \
  data.train_files="$prompts" data.val_files="$prompts" data.train_batch_size=32 \
  actor_rollout_ref.model.path="$model" \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.ppo_mini_batch_size=8 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=1e-4 \
  actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
  actor_rollout_ref.actor.loss_agg_mode=token-mean \
  actor_rollout_ref.actor.checkpoint.save_contents='[model,optimizer,extra,hf_model]' \
  trainer.default_local_dir="$output" trainer.save_freq=1 trainer.n_gpus_per_node=8 trainer.nnodes=1 \
  trainer.logger='[console]' \
  "$@"
