#!/usr/bin/env bash
# One open issue says what drifts: opened when there is something, updated each night, closed when all holds again.
# CODE is the gate's exit code, RUN the address of the run; the report lies in vllm-gate/gate.md.
set -euo pipefail

title="vLLM drifts from what is known here"
label="vllm-drift"
gh label create "$label" --description "Found by the nightly gate" 2> /dev/null || true
number="$(gh issue list --state open --label "$label" --json number --jq '.[0].number // empty')"
if [ "$CODE" = 0 ]; then
  [ -z "$number" ] || gh issue close "$number" --comment "All holds again: $RUN"
  exit 0
fi
{
  printf 'Exit code %s; the reports are artifacts of %s\n\n' "$CODE" "$RUN"
  head -c 60000 vllm-gate/gate.md # an issue may hold 65,536 characters
} > drift.md
if [ -z "$number" ]; then
  gh issue create --title "$title" --label "$label" --body-file drift.md
else
  gh issue edit "$number" --body-file drift.md
fi
