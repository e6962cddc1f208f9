"""What a user installs: the built wheel, alone in an empty environment, runs the embedded model."""

import email
import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile

import pytest

from tests.tree import ROOT

TINY = ROOT / "qwisp" / "models" / "tiny"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this tree, built by what pyproject.toml names, without network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    build = subprocess.run(command, capture_output=True, text=True, check=False)
    assert build.returncode == 0, build.stdout + build.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The Python of an environment with the wheel in it; its dependencies are those of this run."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    paths = sysconfig.get_paths("venv", {"base": str(folder), "platbase": str(folder)})
    # A path line of a .pth file comes after the environment's own folder and brings no .pth files
    # of its own, so an editable install of this tree stays out of sight.
    ours = sorted({sysconfig.get_paths()[key] for key in ("purelib", "platlib")})
    borrowed = os.path.join(paths["purelib"], "borrowed.pth")
    with open(borrowed, "w", encoding="utf-8") as file:
        file.write("\n".join(ours) + "\n")
    python = os.path.join(paths["scripts"], "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--quiet", "--ignore-installed", wheel], check=True)
    return python


RUN = """
import json, socket, sys

def refuse(*arguments):
    raise AssertionError(f"network: {arguments}")

socket.socket.connect = refuse
import qwisp

with qwisp.Engine.load() as engine:
    completion = engine.generate("def add(a, b):", max_tokens=2)
print(json.dumps({
    "file": qwisp.__file__,
    "version": qwisp.__version__,
    "names": sorted(qwisp.__all__),
    "tokens": completion.token_ids,
    "missing": [name for name in qwisp.__all__ if not hasattr(qwisp, name)],
}))
"""


def test_the_wheel_runs_the_embedded_model_in_an_empty_environment(wheel, installed, tmp_path):
    # -I leaves out the current folder and PYTHONPATH: only the environment itself counts.
    run = subprocess.run(
        [installed, "-I", "-c", RUN], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    assert report["file"].startswith(os.path.dirname(os.path.dirname(installed)))
    assert report["version"] == wheel.name.split("-")[1]
    assert report["missing"] == []
    assert len(report["tokens"]) == 2


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {re.sub(r"-.*", "", top) for top in tops} == {"qwisp"}
    assert "qwisp/py.typed" in names
    assert not [name for name in names if name.endswith(".pyc")]


def test_the_wheel_holds_the_embedded_model_byte_for_byte(wheel):
    archive = zipfile.ZipFile(wheel)
    files = sorted(path for path in TINY.iterdir() if path.is_file())
    assert {"config.json", "tokenizer.json", "model-00001-of-00002.safetensors"} <= {
        path.name for path in files
    }
    for path in files:
        packed = hashlib.sha256(archive.read(f"qwisp/models/tiny/{path.name}"))
        assert packed.digest() == hashlib.sha256(path.read_bytes()).digest(), path.name


def test_the_metadata_asks_for_one_mlx_on_each_system(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(archive.read(name))
    required = [line.replace('"', "'") for line in metadata.get_all("Requires-Dist")]
    mlx = {line for line in required if re.match(r"mlx\b(?!-)", line) and "extra ==" not in line}
    assert {re.sub(r"[^;]*; ", "", line) for line in mlx} == {
        "platform_system == 'Darwin'",
        "platform_system == 'Linux'",
    }
    assert [line.startswith("mlx[cpu]") for line in sorted(mlx)] == [False, True]
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
