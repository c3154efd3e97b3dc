"""How good is a draft? On held-out rows, in a real server, and beside what needs no draft."""

from __future__ import annotations

from pipeline.config import EvaluateConfig
from pipeline.devices import make_current
from pipeline.evaluation.report import write_report
from pipeline.evaluation.request import DRAFT, UNTRAINED
from pipeline.evaluation.results import Results
from pipeline.evaluation.servers import serve
from pipeline.evaluation.task import check_options, checked_draft, task_of, untrained_draft
from pipeline.evaluation.texts import replay, teacher_force
from pipeline.lock import exclusive
from pipeline.object_store.address import refuse_addresses


def evaluate(config: EvaluateConfig) -> Results:
    """Evaluate, and write the report; parts that are finished already are kept.

    Raises:
        UsageError: options, draft or data cannot be used.
        SpecshimError: the draft does not fit the server (and ``force`` was not given).
    """
    refuse_addresses(config)
    check_options(config)
    checked = checked_draft(config)
    make_current(config.device)
    with exclusive(config.output_dir):
        task = task_of(config, checked)
        results = Results(
            str(checked.draft.path), str(checked.verifier.path), task.steps, task.layers, checked.trained.layers,
            [finding.found for finding in checked.mismatches],
        )  # fmt: skip
        drafts = {DRAFT: task.fed}
        if config.untrained:
            drafts[UNTRAINED] = untrained_draft(task)
        teacher_force(task, results, drafts)
        prompts = serve(task, results, drafts)
        replay(task, results, prompts)
        write_report(results, config.output_dir, checked.draft.path.parent / "metrics.jsonl")
    return results
