#!/bin/bash
# make demo POLICY=vllm: the demo on a real vLLM of this machine, which ends with it.
# PRORL_VLLM_PYTHON names an interpreter with vLLM; $1 is prorl, what follows goes to `prorl demo`.
set -euo pipefail
prorl=$1; shift
model=$("$(dirname "$prorl")/python" -c 'from prorl.backends.embedded import TOY; print(TOY)')
port=${VLLM_PORT:-8731}
log=$(mktemp -t prorl-vllm-XXXXXX.log)
export VLLM_SERVER_DEV_MODE=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
if "$PRORL_VLLM_PYTHON" -c 'import sys, torch; sys.exit(torch.cuda.is_available())'; then
  # On two cores: one process, no compiler (measured with vLLM 0.32 for CPUs).
  export TORCH_COMPILE_DISABLE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 OMP_NUM_THREADS=1
  # vLLM 0.32 on a CPU dies of a prompt with a seed that it reads in two pieces.
  more=(--enforce-eager --no-enable-chunked-prefill --kv-cache-memory-bytes 128M --block-size 32 --distributed-executor-backend uni)
fi
# A session of its own: the engine would outlive a server that is killed alone.
setsid "$PRORL_VLLM_PYTHON" -m vllm.entrypoints.openai.api_server --model "$model" \
  --served-model-name toy --host 127.0.0.1 --port "$port" --dtype float32 --max-model-len 512 \
  --generation-config vllm --logprobs-mode processed_logprobs --enable-prompt-tokens-details \
  --uvicorn-log-level warning ${more[@]+"${more[@]}"} > "$log" 2>&1 &
server=$!
trap 'kill -KILL -- -$server 2>/dev/null || true' EXIT
echo "vLLM starts (log: $log)"
until curl -sf "http://127.0.0.1:$port/health" > /dev/null; do
  kill -0 "$server" 2>/dev/null || { tail -n 20 "$log"; echo "vLLM did not start"; exit 1; }
  sleep 0.5
done
"$prorl" demo --policy "http://127.0.0.1:$port" --minutes "${MINUTES:-10}" "$@"
