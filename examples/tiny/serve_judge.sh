# For scripts: serve_judge DIR PORT LOG serves the judge in DIR with vLLM until the script ends.

serve_judge() {
  # `vllm serve DIR`, in words that vLLM's CPU build understands, too.
  VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_NO_USAGE_STATS=1 \
    "$VAPO_PYTHON" -m vllm.entrypoints.openai.api_server --model "$1" --served-model-name judge \
    --host 127.0.0.1 --port "$2" --dtype float32 --max-model-len 512 --enforce-eager >"$3" 2>&1 &
  server=$!
  trap 'kill "$server" 2>/dev/null || true' EXIT
  echo "the judge's server starts, see $3"
  until (exec 3<>"/dev/tcp/127.0.0.1/$2") 2>/dev/null; do
    kill -0 "$server" 2>/dev/null || { echo "error: the judge's server ended, see $3" >&2; exit 1; }
    sleep 1
  done
}
