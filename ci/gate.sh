#!/usr/bin/env bash
# Runs the gate for a CI job: GATE_* are its options, see action.yml. Writes all reports; on GitHub, also the step's
# summary and outputs. Ends with the gate's own exit code.
set -euo pipefail

output="${GATE_OUTPUT:-vllm-gate}"
mkdir -p "$output"
arguments=(--format "${GATE_FORMAT:-text}" --fail-on "${GATE_FAIL_ON:-broken}")
for report in markdown=gate.md json=gate.json junit=gate.xml sarif=gate.sarif html=gate.html; do
  arguments+=(--output "${report%%=*}=$output/${report#*=}")
done
[ -z "${GATE_BASELINE:-}" ] || arguments+=(--baseline "$GATE_BASELINE")
[ "${GATE_PRE:-false}" != true ] || arguments+=(--pre)
read -r -a speculators <<< "${GATE_SPECULATORS:-}"
read -r -a consumers <<< "${GATE_CONSUMERS:-}"
read -r -a targets <<< "${GATE_TARGETS:-}"
for one in ${speculators[@]+"${speculators[@]}"}; do arguments+=(--speculators "$one"); done
for one in ${consumers[@]+"${consumers[@]}"}; do arguments+=(--consumer "$one"); done
if [ "${#targets[@]}" -eq 0 ]; then
  arguments+=(--from-diff)
else
  arguments+=(-- "${targets[@]}")
fi

code=0
specshim gate "${arguments[@]}" || code=$?
if [ -n "${GITHUB_STEP_SUMMARY:-}" ] && [ -f "$output/gate.md" ]; then
  # A summary may hold 1 MiB.
  head -c 1000000 "$output/gate.md" >> "$GITHUB_STEP_SUMMARY"
fi
if [ -n "${GITHUB_OUTPUT:-}" ]; then
  printf 'exit-code=%s\nreports=%s\n' "$code" "$output" >> "$GITHUB_OUTPUT"
fi
exit "$code"
