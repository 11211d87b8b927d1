"""Images: how one is identified, and which are refused."""

import json
import os
import platform
import shutil
import struct
import subprocess

import pytest

from slurmgpu.containers import images as images_module
from slurmgpu.containers.images import identify, same_image
from slurmgpu.containers.settings import ContainerError
from slurmgpu.containers.sif import DESCRIPTOR, HEADER, read_sif
from slurmgpu.errors import SlurmGPUError
from tests.support.images import NOBODY, fork

OTHER = {"x86_64": (b"04", "aarch64")}.get(platform.machine(), (b"02", "x86_64"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "slurmgpu" / "digests.json"


@pytest.fixture
def image(apptainer, tmp_path):
    return shutil.copyfile(apptainer.sif, tmp_path / "image.sif")


def object_place(content, kind):
    """Where the descriptor of the object of a kind lies in a SIF."""
    offset = HEADER.unpack_from(content)[9]
    return next(place for place in range(offset, len(content), DESCRIPTOR.size) if content[place : place + 2] == kind)


def sum_by_apptainer(image):
    """The digest of the root file system, as its tool and sha256sum say it; it is object 3 of these images."""
    done = subprocess.run(f"apptainer sif dump 3 {image} | sha256sum", shell=True, capture_output=True, text=True)
    return done.stdout.split()[0]


def test_an_image_is_identified_as_apptainer_sees_it(apptainer, image):
    found = identify(image)
    header = subprocess.run(["apptainer", "sif", "header", image], capture_output=True, text=True).stdout
    assert found["kind"] == "sif"
    assert found["uuid"] in header
    assert found["arch"] == platform.machine()
    assert found["size_bytes"] == image.stat().st_size
    assert found["sha256"] == subprocess.run(["sha256sum", image], capture_output=True, text=True).stdout.split()[0]
    assert found["partition_sha256"] == sum_by_apptainer(image)
    inspected = subprocess.run(["apptainer", "inspect", "--json", "--labels", image], capture_output=True, text=True)
    assert found["labels"] == json.loads(inspected.stdout)["data"]["attributes"]["labels"]
    assert json.loads(json.dumps(found)) == found
    same_image(image, found)


def test_a_sandbox_is_identified_by_its_labels(apptainer, tmp_path):
    found = identify(apptainer.sandbox)
    assert found["kind"] == "sandbox"
    assert found["labels"]["org.label-schema.build-arch"]
    same_image(apptainer.sandbox, found)
    other = tmp_path / "other"
    shutil.copytree(apptainer.sandbox, other, symlinks=True)
    labels = other / ".singularity.d" / "labels.json"
    labels.write_text(labels.read_text().replace("build-date", "built-when"))
    with pytest.raises(ContainerError, match="not the one that this run was planned with"):
        same_image(other, found)
    with pytest.raises(ContainerError, match="not a sif"):
        same_image(apptainer.sandbox, identify(apptainer.sif))


def test_signing_changes_the_file_but_not_its_root_file_system(image, tmp_path):
    before = identify(image)
    key = tmp_path / "key.pem"
    if subprocess.run(["openssl", "genrsa", "-out", key, "2048"], capture_output=True).returncode:
        pytest.skip("openssl makes no key here")
    done = subprocess.run(["apptainer", "sign", "--key", key, image], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = identify(image)
    assert after["sha256"] != before["sha256"]
    assert after["partition_sha256"] == before["partition_sha256"]


def write(image, place, value):
    content = bytearray(image.read_bytes())
    content[place : place + len(value)] = value
    image.write_bytes(content)


def cut(image, size):
    with open(image, "r+b") as file:
        file.truncate(size)


def other_arch(image):
    content = image.read_bytes()
    write(image, object_place(content, struct.pack("<H", 0x4004)) + DESCRIPTOR.size - 384 + 8, OTHER[0])


def encrypted(image):
    content = image.read_bytes()
    write(image, object_place(content, struct.pack("<H", 0x4004)) + DESCRIPTOR.size - 384, b"\x05")


def no_root(image):
    content = image.read_bytes()
    write(image, object_place(content, struct.pack("<H", 0x4004)) + DESCRIPTOR.size - 384 + 4, b"\x03")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda image: image.unlink(), "not there"),
        (lambda image: (image.unlink(), os.mkfifo(image)), "cannot be read: it is a FIFO, not a file"),
        (lambda image: image.write_text("hello"), "is not a container image"),
        (lambda image: image.write_bytes(b""), "is not a container image"),
        (lambda image: cut(image, 100), "is not a container image"),
        (lambda image: cut(image, 128), "truncated"),
        (lambda image: cut(image, 20_000), "truncated"),
        (lambda image: cut(image, image.stat().st_size - 1), "truncated"),
        (other_arch, f"is built for {OTHER[1]}"),
        (encrypted, "is encrypted"),
        (no_root, "has no root file system"),
        (lambda image: write(image, read_sif(image).root_offset, b"\0\0\0\0"), "not squashfs"),
        (lambda image: write(image, 42, b"02"), "has SIF version 02"),
        (lambda image: (image.unlink(), image.mkdir()), "lacks .singularity.d"),
    ],
)
def test_what_cannot_run_is_refused_in_a_sentence_that_names_it(image, damage, sentence):
    damage(image)
    with pytest.raises(SlurmGPUError, match=sentence) as caught:
        identify(image)
    assert str(image) in str(caught.value)


def test_a_header_that_lies_about_its_objects_is_refused(image):
    content = image.read_bytes()
    n_objects, table, data_size = 88, 96, 120
    partition = object_place(content, struct.pack("<H", 0x4004)) + 17
    lies = [(n_objects, 1 << 40), (n_objects, 5000), (n_objects, 0), (n_objects, -5), (table, 1 << 40), (table, -1)]
    lies += [(data_size, 1 << 60), (partition, 1 << 40), (partition, -4096), (partition + 8, -1)]
    for place, value in lies:
        write(image, place, struct.pack("<q", value))
        with pytest.raises(SlurmGPUError):
            identify(image)
        image.write_bytes(content)


def test_a_time_of_building_that_is_none_is_unknown(image):
    created = 64
    for value in (1 << 40, 1 << 60, -(1 << 60)):
        write(image, created, struct.pack("<q", value))
        assert identify(image)["created"] is None


def test_an_image_that_may_not_be_read_is_refused(image, normal_user):
    image.chmod(0)
    if os.geteuid() != 0:
        with pytest.raises(SlurmGPUError, match="Permission denied"):
            identify(image)
        return

    def as_a_normal_user():
        os.setgroups([])
        os.setresuid(NOBODY, NOBODY, NOBODY)
        with pytest.raises(SlurmGPUError, match="Permission denied"):
            identify(image)

    assert os.waitpid(fork(as_a_normal_user), 0)[1] == 0


def test_the_node_that_lacks_the_image_is_at_fault(image):
    identity = identify(image)
    image.unlink()
    with pytest.raises(ContainerError, match="is not on this node") as caught:
        same_image(image, identity)
    assert caught.value.node_at_fault


def test_another_image_in_the_place_of_the_planned_one_is_refused(apptainer, image, tmp_path):
    identity = identify(image)
    content = image.read_bytes()
    changes = [
        lambda: image.write_bytes(content + b"\0"),  # another size
        lambda: write(image, 48, b"\0" * 16),  # another UUID
        lambda: write(image, len(content) - 1, b"\1"),  # the same header
        lambda: cut(image, 100),
    ]
    for change in changes:
        change()
        with pytest.raises(ContainerError) as caught:
            same_image(image, identity)
        assert not caught.value.node_at_fault
        image.write_bytes(content)
    same_image(image, identity)  # copied again, with another time of change


def test_hashing_is_done_once_and_again_when_the_file_changes(image, cache, monkeypatch):
    computed = []
    compute = images_module._compute
    monkeypatch.setattr(images_module, "_compute", lambda *args: computed.append(args) or compute(*args))
    first = identify(image)
    assert identify(image) == first
    same_image(image, first)
    assert len(computed) == 1
    os.utime(image, ns=(1, 1))
    same_image(image, first)
    same_image(image, first)
    assert len(computed) == 2
    for damaged in ('{"cut', "[]", json.dumps({key: {} for key in json.loads(cache.read_text())})):
        cache.write_text(damaged)
        assert identify(image)["sha256"] == first["sha256"]
    assert len(computed) == 5


def test_a_cache_that_cannot_be_written_costs_time_only(image, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert identify(image) == identify(image)
