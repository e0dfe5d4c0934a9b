"""Prepares a release, except for the upload: docs/releasing.md.

    pip install ".[release]"                  # in an environment without the extra `test`
    python tools/release.py --rehearse        # all but the tag; the version may have no date
    python tools/release.py                   # the version in pyproject.toml, and its tag

It stops at the first error. The results are in dist/: sdist, wheel and NOTES.md. Nothing leaves
this machine.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"


def stop(text):
    """Ends the program with a reason."""
    sys.exit(f"release: {text}")


def run(*command, cwd=ROOT):
    """Runs a command and returns its output; ends the program on failure."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        stop(f"`{' '.join(map(str, command))}` failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def step(text):
    """Prints the next step."""
    print(f"release: {text}", flush=True)


def version():
    """The version, on which three files must agree."""
    found = {
        "pyproject.toml": r'^version = "(.+)"$',
        "tf_redsync/version.py": r'^__version__ = "(.+)"$',
        "CITATION.cff": r"^version: (.+)$",
    }
    for name, pattern in found.items():
        match = re.search(pattern, (ROOT / name).read_text(), re.M)
        found[name] = match.group(1) if match else None
    if len(set(found.values())) != 1:
        stop(f"the versions differ: {found}")
    return found["pyproject.toml"]


def notes(number, *, dated):
    """Returns the section of CHANGELOG.md for a version; with `dated`, its heading needs a date."""
    text = (ROOT / "CHANGELOG.md").read_text()
    pattern = rf"^## \[{re.escape(number)}\](.*?)\n(.*?)(?=^## \[|\Z)"
    match = re.search(pattern, text, re.M | re.S)
    if match is None or not match.group(2).strip():
        stop(f"CHANGELOG.md has no section [{number}]")
    if dated and not re.fullmatch(r" - \d{4}-\d\d-\d\d", match.group(1)):
        stop(f"set the date of the release in CHANGELOG.md: ## [{number}] - YYYY-MM-DD")
    return match.group(2).strip() + "\n"


def build(tree):
    """Builds sdist and wheel of a tree; the wheel is built from the unpacked sdist, as by users."""
    run(sys.executable, "-m", "build", "--outdir", DIST, tree)
    return next(DIST.glob("*.tar.gz")), next(DIST.glob("*.whl"))


def check_contents(sdist, wheel):
    """Checks that the sdist has git's files, and that the wheel is universal without a library."""
    tracked = set(run("git", "ls-tree", "-r", "--name-only", "HEAD").splitlines())
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    if tracked - packed:
        stop(f"not in the sdist, see MANIFEST.in: {sorted(tracked - packed)}")
    names = zipfile.ZipFile(wheel).namelist()
    sources = [n for n in tracked if n.startswith("custom_ops/") and n.endswith((".cc", ".cu"))]
    if not wheel.name.endswith("-py3-none-any.whl") or any(n.endswith(".so") for n in names):
        stop(f"{wheel.name} is for one machine")
    missing = {f"tf_redsync/_native/{name}" for name in sources} - set(names)
    if missing:
        stop(f"not in the wheel: {sorted(missing)}")


def main():
    """Runs all steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="build and check, without a tag")
    options = parser.parse_args()
    number = version()
    step(f"version {number}")
    if run("git", "status", "--porcelain"):
        stop("commit or remove what `git status` shows")
    text = notes(number, dated=not options.rehearse)
    run("cffconvert", "--validate", "-i", "CITATION.cff")
    DIST.mkdir(exist_ok=True)
    for old in [*DIST.glob("*.tar.gz"), *DIST.glob("*.whl")]:
        old.unlink()
    step("building sdist and wheel of the last commit")
    with tempfile.TemporaryDirectory() as folder:
        run("git", "archive", "--output", f"{folder}/tree.tar", "HEAD")
        with tarfile.open(f"{folder}/tree.tar") as archive:
            archive.extractall(f"{folder}/tree", filter="data")
        sdist, wheel = build(pathlib.Path(folder) / "tree")
    check_contents(sdist, wheel)
    step(run("twine", "check", "--strict", sdist, wheel).strip())
    (DIST / "NOTES.md").write_text(text)
    step(f"{sdist.name}, {wheel.name} and NOTES.md ({len(text.split())} words) are in {DIST}")
    if not re.search(r"^\[project\.urls\]", (ROOT / "pyproject.toml").read_text(), re.M):
        step("pyproject.toml has no [project.urls] yet: add them before the first upload")
        if not options.rehearse:
            stop("not tagged")
    if not options.rehearse:
        run("git", "tag", "--annotate", f"v{number}", "--message", f"tf_redsync {number}")
        step(f"tagged v{number}")
    step(f"ready; next: git push origin v{number} && twine upload {DIST}/*.whl {DIST}/*.tar.gz")


if __name__ == "__main__":
    main()
