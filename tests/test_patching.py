"""Putting the shims in place and taking them away again, on packages in small; no torch, no vLLM."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from mini_stack import Done, install, run_bare

GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"

# What the shims may touch, seen by identity.
LOOK = """
import importlib, inspect, sys
MODULES = (
    "speculators.data_generation.vllm_hidden_states_generator",
    "speculators.data_generation.custom_worker",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.core.kv_cache_utils",
    "vllm.utils",
    "vllm.config",
    "vllm.v1.request",
    "transformers",
    "transformers.configuration_utils",
)
def look():
    modules = [importlib.import_module(name) for name in MODULES]
    packages = ("vllm", "speculators", "transformers")
    seen = {("sys.modules", n): m for n, m in sys.modules.items() if n.partition(".")[0] in packages}
    for name, module in zip(MODULES, modules):
        for key, value in vars(module).items():
            seen[name, key] = value
            if inspect.isclass(value) and value.__module__ == name:
                seen.update({(name, key, k): v for k, v in vars(value).items()})
    return seen
def changed(before, after):
    return sorted(map(str, (k for k in before.keys() | after.keys() if before.get(k) is not after.get(k))))
"""


def _mini(folder: Path, code: str, vllm: str = "0.16.0", speculators: str = "0.4.0.1", **environment: str) -> Done:
    transformers = environment.pop("transformers", "4.57.6")
    path = install(folder, torch=False, vllm=vllm, speculators=speculators, transformers=transformers)
    return run_bare(code, path, **environment)


# --- orders ---------------------------------------------------------------------------------------

_STEPS = {
    "shims": "import shims",
    "install": "import shims; shims.install()",
    "vllm": "import vllm.v1.core.kv_cache_utils, vllm.v1.executor.multiproc_executor",
    "speculators": f"import {GENERATOR}",
}
_ORDERS = [" ".join(order) for order in itertools.permutations(("shims", "vllm", "speculators"))]
_ORDERS += ["shims install install vllm install speculators install", "vllm shims install speculators install"]

IN_FORCE = f"""
import importlib, shims
module = importlib.import_module("{GENERATOR}")
assert shims.report().state == "adapted", shims.report().render()
assert module.Request is not sys.modules["vllm.v1.request"].Request, "Request is not adapted"
assert module.VllmHiddenStatesGenerator.generate.__module__ == "shims.behaviours.generator"
assert module.Request(request_id="a", prompt_token_ids=[1], sampling_params=None, pooling_params=None,
                      eos_token_id=1, arrival_time=0.0).num_prompt_tokens == 1
"""


@pytest.mark.parametrize("order", _ORDERS)
def test_every_order_of_imports_ends_adapted(tmp_path: Path, order: str) -> None:
    """Nothing has to be imported first: the seams are speculators' own globals, so early imports do not escape."""
    steps = "\n".join(_STEPS[step] for step in order.split())
    _mini(tmp_path, f"import sys\n{steps}\n{IN_FORCE}", vllm="0.17.0").says()


@pytest.mark.parametrize("stack", ["0.11.0 0.4.0.1 4.57.6", "0.16.0 0.3.0 4.57.6", "0.33.0 0.3.0 5.24.0"])
@pytest.mark.parametrize("first", ["shims", "packages"])
def test_uninstall_restores_every_object_by_identity(tmp_path: Path, stack: str, first: str) -> None:
    """Also what was provided (modules, names, __getattr__) is gone; installed again, all is in place again."""
    vllm, speculators, transformers = stack.split()
    code = f"""
{LOOK}
first = {first!r}
import shims
look()  # imports everything, adapted: some of it cannot be imported otherwise
if first == "packages":
    assert shims.uninstall() == []
    before = look()
    shims.install()
else:
    adapted = look()
    assert shims.uninstall() == []
    before = look()
    shims.install()
assert shims.report().state == "adapted", shims.report().render()
assert len(changed(before, look())) > 10
assert shims.uninstall() == []
assert changed(before, look()) == [], changed(before, look())
assert shims.report().state == "disabled"
shims.install()
{IN_FORCE if vllm == "0.17.0" else ""}
assert shims.report().state == "adapted"
assert shims.uninstall() == []
assert changed(before, look()) == [], changed(before, look())
assert shims.uninstall() == []
"""
    _mini(tmp_path, code, vllm, speculators, transformers=transformers).says()


def test_uninstalled_before_the_packages_come_nothing_is_changed(tmp_path: Path) -> None:
    code = f"""
{LOOK}
import shims
assert shims.uninstall() == []
import speculators, {GENERATOR} as module
assert module.Request is sys.modules["vllm.v1.request"].Request
assert module.VllmHiddenStatesGenerator.generate.__module__ == module.__name__
assert "shims.patching" not in sys.modules
assert shims.report().state == "disabled"
"""
    _mini(tmp_path, code).says()


def test_uninstalled_between_two_imports_the_second_is_left_alone(tmp_path: Path) -> None:
    """Import hooks cannot be taken back; they must find out that nobody wants them any more."""
    code = f"""
import sys
import shims
import vllm.v1.executor.multiproc_executor
assert shims.uninstall() == []
import {GENERATOR} as module
assert module.Request is sys.modules["vllm.v1.request"].Request
shims.install()
assert module.Request is not sys.modules["vllm.v1.request"].Request
assert shims.report().state == "adapted"
"""
    _mini(tmp_path, code).says()


def test_vllm_itself_stays_as_it_is_for_everyone_else(tmp_path: Path) -> None:
    code = f"""
{LOOK}
import shims
shims.uninstall()
before = look()
shims.install()
touched = [k for k in changed(before, look()) if "'vllm" in k]
assert touched == ["('vllm.v1.executor.multiproc_executor', 'WorkerProc', 'enqueue_output')"], touched
"""
    _mini(tmp_path, code).says()


def test_installing_twice_changes_nothing(tmp_path: Path) -> None:
    """Adapters must not stand on adapters."""
    code = f"""
{LOOK}
import shims
once = look()
shims.install()
shims.install_by_environment()
assert changed(once, look()) == []
"""
    _mini(tmp_path, code).says()


@pytest.mark.parametrize(
    ("value", "state"), [("1", "disabled"), ("yes", "disabled"), ("0", "adapted"), ("", "adapted")]
)
def test_shims_disable(tmp_path: Path, value: str, state: str) -> None:
    code = f"""
import sys, shims, {GENERATOR} as module
print(shims.report().state, module.Request is sys.modules["vllm.v1.request"].Request)
"""
    said = _mini(tmp_path, code, SHIMS_DISABLE=value).says()
    assert said.split() == [state, str(state == "disabled")]


# --- someone else's patches -----------------------------------------------------------------------


def test_a_later_patch_of_someone_elses_is_left_alone_and_named(tmp_path: Path) -> None:
    code = f"""
import sys, shims, {GENERATOR} as module
stock = sys.modules["vllm.v1.request"].Request
ours = module.Request
module.Request = theirs = lambda **kw: ours(**kw)
print(shims.uninstall())
assert module.Request is theirs
assert module.SamplingParams is sys.modules["vllm.sampling_params"].SamplingParams
"""
    assert _mini(tmp_path, code).says().strip() == f"['{GENERATOR}.Request']"


def test_an_earlier_patch_of_someone_elses_is_kept(tmp_path: Path) -> None:
    """The original is what was there, not what the package shipped; `__wrapped__` is not peeled."""
    code = f"""
import functools
import {GENERATOR} as module
stock = module.SamplingParams
@functools.wraps(stock)
def theirs(max_tokens=16, temperature=1.0):
    return "theirs"
module.SamplingParams = theirs
import shims
assert module.SamplingParams(max_tokens=1, temperature=0.0) == "theirs"
assert shims.uninstall() == []
assert module.SamplingParams is theirs
"""
    _mini(tmp_path, code).says()


# --- moved and absent names -----------------------------------------------------------------------


def test_a_moved_name_is_offered_lazily_at_its_old_home(tmp_path: Path) -> None:
    """The new home imports the old one, so nothing may be looked up while the old one is imported."""
    code = """
import sys, shims
import vllm.v1.core.kv_cache_utils as old
assert "vllm.v1.core.kv_cache_planning" not in sys.modules
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups as found
assert found is sys.modules["vllm.v1.core.kv_cache_planning"].get_kv_cache_config_from_groups
assert not hasattr(old, "something_else")
try:
    old.something_else
except AttributeError as error:
    assert "kv_cache_utils" in str(error) and "something_else" in str(error)
shims.uninstall()
assert not hasattr(old, "get_kv_cache_config_from_groups")
assert "__getattr__" not in vars(old)
"""
    _mini(tmp_path, code, "0.33.0", transformers="5.19.0").says()


def test_a_name_that_moved_unannounced_is_refused_where_it_is_asked_for(tmp_path: Path) -> None:
    code = f"""
import vllm.v1.core.kv_cache_utils as utils
del utils.unify_hybrid_kv_cache_specs
import shims
try:
    import {GENERATOR}
except Exception as error:
    print(type(error).__name__, error)
print(shims.report().state)
"""
    said = _mini(tmp_path, code).says()
    assert "DriftError vllm.v1.core.kv_cache_utils:unify_hybrid_kv_cache_specs" in said
    assert all(word in said for word in ("wanted:", "found:", "next:", "does not exist"))
    assert said.strip().endswith("drifted")


@pytest.mark.parametrize("vllm", ["0.11.0", "0.11.2"])
def test_an_absent_module_is_provided_where_it_is_absent(tmp_path: Path, vllm: str) -> None:
    code = f"""
import sys, shims, {GENERATOR}
assert ("vllm.utils.hashing" in sys.modules)
print(sys.modules["vllm.utils.hashing"].__spec__ is None)
"""
    assert _mini(tmp_path, code, vllm).says().strip() == str(vllm == "0.11.0")


@pytest.mark.parametrize("speculators", ["0.5.0", "0.9.0"])
def test_a_speculators_without_generator_gets_one(tmp_path: Path, speculators: str) -> None:
    """The direct engine's class, at its old home; undone, the module is gone again."""
    package = tmp_path / "speculators" / "data_generation"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    code = f"""
import shims, importlib, sys
from {GENERATOR} import VllmHiddenStatesGenerator as offered
print(offered.__module__, shims.report().state, *shims.report().applied)
shims.uninstall()
assert {GENERATOR!r} not in sys.modules
try:
    importlib.import_module({GENERATOR!r})
except ModuleNotFoundError:
    print("gone")
"""
    said = _mini(tmp_path, code, "0.32.0", speculators).says().split()
    assert said == ["shims.direct.generator", "adapted", "generator-on-the-direct-engine", "gone"]


@pytest.mark.parametrize("transformers", ["4.57.6", "5.3.0", "5.4.0", "5.19.0", "5.24.0"])
def test_speculators_can_be_imported_beside_any_transformers(tmp_path: Path, transformers: str) -> None:
    _mini(tmp_path, f"import shims, {GENERATOR}", transformers=transformers).says()


# --- hooks that fail ------------------------------------------------------------------------------

REFUSED = f"""
import {GENERATOR} as module
print("now", shims.report().state)
for ask in (module.VllmHiddenStatesGenerator, lambda: shims.require()):
    try:
        ask()
    except Exception as error:
        print(type(error).__name__)
        assert all(word in str(error) for word in ("wanted:", "found:", "next:")), error
"""


DAMAGES = {
    "an adapter cannot be loaded": "import shims.patching; shims.patching.load = None",
    "a method is gone": f"import {GENERATOR} as g; del g.VllmHiddenStatesGenerator.generate",
    "the generator is gone": f"import {GENERATOR} as g; del g.VllmHiddenStatesGenerator",
    "a global is gone": f"import {GENERATOR} as g; del g.Scheduler",
    "a method of vLLM is gone": "import vllm.v1.executor.multiproc_executor as m; del m.WorkerProc.enqueue_output",
    "the worker is gone": "import speculators.data_generation.custom_worker as w; del w.HiddenStatesWorkerExtension",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_hook_that_fails_leaves_a_generator_that_refuses(tmp_path: Path, damage: str) -> None:
    """wrapt drops a hook that raises and the next import would succeed unpatched: so none raises, none is forgotten."""
    code = f"import os\nos.environ['SHIMS_DISABLE'] = '1'\n{DAMAGES[damage]}\nimport shims\nshims.install()\n{REFUSED}"
    said = _mini(tmp_path, code).says()
    assert "specshim could not adapt" in said
    assert said.rpartition("now ")[2].split() == ["drifted", "DriftError", "DriftError"]


def test_a_generator_that_refused_is_itself_again_after_uninstall(tmp_path: Path) -> None:
    code = f"""
import logging
logging.disable(logging.CRITICAL)
import shims.patching
import {GENERATOR} as module
shims.uninstall()
stock, load = module.VllmHiddenStatesGenerator, shims.patching.load
shims.patching.load = None
shims.install()
assert module.VllmHiddenStatesGenerator is not stock
assert shims.uninstall() == []
assert module.VllmHiddenStatesGenerator is stock
shims.patching.load = load
shims.install()
assert shims.report().state == "adapted"
"""
    _mini(tmp_path, code).says()
