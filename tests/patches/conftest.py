import os

import pytest

from rl_memory_plugins import patching
from tests.patches.releases import unpack


def snapshot(root):
    """Every file under `root`: relative path → (content, mode)."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mode)
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="session")
def released(tmp_path_factory):
    """`released(version)`: a directory with that release, shared by all tests, which must not change it."""
    sites = {}

    def get(version):
        if version not in sites:
            sites[version] = tmp_path_factory.mktemp(f"sglang-{version}-")
            unpack(version, sites[version])
        return sites[version]

    return get


def linked(source, target):
    """A site-packages that is hard-linked from another, as installers do it from their cache."""
    for path in source.rglob("*"):
        if path.is_file():
            link = target / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, link)
    return target


@pytest.fixture
def site(released, tmp_path):
    """`site(version)`: a site-packages of the test's own."""
    return lambda version: linked(released(version), tmp_path / f"site-{version}")


@pytest.fixture(scope="session")
def patched(released, tmp_path_factory):
    """`patched(version)`: that release, patched, to be run: its byte code is written once for all tests."""
    sites = {}

    def get(version):
        if version not in sites:
            root = linked(released(version), tmp_path_factory.mktemp("patched") / "site")
            patching.apply(patching.find_installation("sglang", root))
            sites[version] = root
        return sites[version]

    return get
