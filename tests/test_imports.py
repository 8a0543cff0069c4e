"""No command imports a package that it does not need, which would slow its start or fail without
the package."""

from __future__ import annotations

import subprocess
import sys

import pytest

# An engine needs no package for the server, recordings or GPUs, which may be missing.
ABSENT = ("msgspec", "starlette", "httptools", "uvicorn", "safetensors", "transformers", "triton")
CODE = f"""
import sys
for name in {ABSENT!r}:
    sys.modules[name] = None  # importing it raises
import kvik.llm, kvik.launch, kvik.worker.worker
"""

# Code -> packages it may import besides the standard library and kvik, and the most modules of
# kvik. About a third more than when this was written; every architecture adds a module to code that
# reads config.json.
BUDGETS = {
    "import kvik": (set[str](), 3),
    "import kvik.cli.main as m; m._help(m.VERBS)": (set[str](), 12),
    "from kvik.cli.main import main; main(['info'])": ({"tokenizers"}, 138),
    "from kvik.cli.main import main; main(['plan', 'llama-3-70b', '--hardware', 'h200'])": (
        {"msgspec", "typing_extensions"},
        141,
    ),
    "import kvik.cli.generate as v; v.build_parser()": ({"tokenizers"}, 118),
    "import kvik.llm": ({"tokenizers"}, 154),
    "import kvik.engine_process": ({"tokenizers", "msgspec", "typing_extensions"}, 160),
    "import kvik.cli.serve as v; v.build_parser()": (
        {
            *("tokenizers", "msgspec", "typing_extensions", "prometheus_client", "starlette"),
            *("anyio", "sniffio", "idna", "jinja2", "markupsafe", "uvicorn", "click", "httptools"),
            *("uvloop", "cython_runtime"),
            "watchfiles",  # imported by uvicorn if installed, as with Ray
        },
        227,
    ),
    "from kvik import LLM\nwith LLM() as llm: llm.generate('Once')": (
        {"tokenizers", "numpy", "torch", "torchgen", "tqdm", "typing_extensions"},
        261,
    ),
}
SHOW = """
import sys
from collections import Counter
known = {*sys.stdlib_module_names, "__mp_main__", "sitecustomize"}
found = Counter(name.partition(".")[0] for name in sys.modules)
print(found.pop("kvik"), *(name for name in found if name not in known))
print(*(name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules))
"""


@pytest.mark.full
def test_an_engine_is_imported_without_optional_packages() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "code",
    [pytest.param(c, marks=pytest.mark.full) if "torch" in BUDGETS[c][0] else c for c in BUDGETS],
)
def test_imports_stay_within_the_limits(code: str) -> None:
    packages, most = BUDGETS[code]
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{code}\n{SHOW}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *_, found, compilers = done.stdout.split("\n")[:-1]
    count, *others = found.split()
    own = {name for name in others if not name.startswith("_")}  # extension modules of packages
    assert own <= packages
    assert int(count) <= most
    assert not compilers
