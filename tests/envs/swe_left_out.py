"""Files that decide about the tests of `swe_calc.py`, as agents write them."""

from __future__ import annotations

LEFT_OUT = {
    "the hidden test's file": {"tests/test_parse.py": "def test_thousands(): pass\n"},
    "a helper of the tests": {"tests/helpers.py": "def same(a, b):\n    return True\n"},
    "a package out of the tests": {"tests/__init__.py": "import builtins\nbuiltins.int = len\n"},
    "conftest.py": {"conftest.py": "def pytest_runtest_call(item): item.obj = print\n"},
    "src/conftest.py": {"src/conftest.py": "import os\nos._exit(0)\n"},
    "pytest.ini": {"pytest.ini": "[pytest]\naddopts = -p evil\n", "evil.py": ""},
    ".pytest.ini": {".pytest.ini": "[pytest]\naddopts = --collect-only\n"},
    "tox.ini": {"tox.ini": "[pytest]\naddopts = --collect-only\n"},
    "-p in pyproject.toml": {
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-q -p evil"\n',
        "evil.py": "import os\nos._exit(0)\n",
    },
    "dotted keys in pyproject.toml": {
        "pyproject.toml": 'tool.pytest.ini_options.addopts = "-p evil"\n',
        "evil.py": "import os\nos._exit(0)\n",
    },
    "-p in setup.cfg": {"setup.cfg": "[tool:pytest]\naddopts = -p evil\n", "evil.py": "1/0\n"},
    "a pyproject.toml of the tests' own": {
        "tests/pyproject.toml": '[tool.pytest.ini_options]\naddopts = "--collect-only"\n'
    },
    "sitecustomize at the root": {"sitecustomize.py": "import os\nos._exit(0)\n"},
    "sitecustomize in src": {"src/sitecustomize.py": "import os\nos._exit(0)\n"},
    "usercustomize in src": {"src/usercustomize.py": "import os\nos._exit(0)\n"},
    "a package pytest at the root": {
        "pytest/__init__.py": "",
        "pytest/__main__.py": "print('PASSED tests/test_parse.py::test_thousands')\n",
    },
    "a package pytest in src": {
        "src/pytest/__init__.py": "raises = print\n",
        "src/pytest/__main__.py": "print('PASSED tests/test_parse.py::test_thousands')\n",
    },
    "_pytest in src": {"src/_pytest/__init__.py": "1/0\n"},
    "pluggy.py": {"pluggy.py": "import os\nos._exit(0)\n"},
    "argparse.py": {"argparse.py": "import os\nos._exit(0)\n"},
    "argparse.py in src": {"src/argparse.py": "import os\nos._exit(0)\n"},
    "a src that is made a package": {
        "src/__init__.py": "",
        "src/argparse.py": "import os\nos._exit(0)\n",
    },
    "iniconfig as a package": {"iniconfig/__init__.py": "import os\nos._exit(0)\n"},
    "a plugin's name": {"pytest_cov.py": "import os\nos._exit(0)\n"},
    "an entry point": {
        "evil.dist-info/METADATA": "Metadata-Version: 2.1\nName: evil\nVersion: 1\n",
        "evil.dist-info/entry_points.txt": "[pytest11]\nevil = evil\n",
        "evil.py": "import os\nos._exit(0)\n",
    },
    "an entry point in src": {
        "src/evil.egg-info/PKG-INFO": "Metadata-Version: 2.1\nName: evil\nVersion: 1\n",
        "src/evil.egg-info/entry_points.txt": "[pytest11]\nevil = evil\n",
        "src/evil.py": "import os\nos._exit(0)\n",
    },
    "a .pth file": {"src/evil.pth": "import os; os._exit(0)\n"},
    "the settings of pytest 9": {"pytest.toml": "[pytest]\naddopts = ['--collect-only']\n"},
    "required plugins in pyproject.toml": {
        "pyproject.toml": '[tool.pytest.ini_options]\nrequired_plugins = "evil"\n'
    },
    "a conftest of the tests": {"tests/conftest.py": "import os\nos._exit(0)\n"},
    "a witness of one's own": {"src/prorl_witness.py": "x", "src/prorl_pytest.py": "x"},
    "tomllib in src": {"src/tomllib.py": "import os\nos._exit(0)\n"},
    "a link in the tests' place": {"tests/unit.py": "from helpers import *\n"},
    "settings of coverage": {".coveragerc": "[run]\nplugins = evil\n", "evil.py": "1/0\n"},
    "collect_ignore beside the tests": {"tests/conftest.py": "collect_ignore_glob = ['*']\n"},
    "hooks that ignore and unselect": {
        "conftest.py": "def pytest_ignore_collect(): return True\n__test__ = False\n"
    },
    "a look-alike of the tests' file": {
        "tests/test_p\u0430rse.py": "def test_thousands(): pass\n",
        "conftest.py": "",
    },
    "compiled code without a source": {"src/calc/parse.pyc": "x", "src/pluggy.pyc": "x"},
}
"""path -> content, written by the agent beside FIX: left out, they change nothing."""
