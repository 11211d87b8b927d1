"""Messages of Apptainer and SingularityCE at a start and during a build, and what each means."""

from __future__ import annotations

import re

from slurmgpu.containers.complaints import INTERPRETER, Complaint, find_complaint
from slurmgpu.containers.settings import ContainerError
from slurmgpu.util.ansi import without_escapes

RUNTIME_LINE = re.compile(r"^(FATAL|ERROR|Error for command)\b")
LAST_WORD = re.compile(r"^(?:FATAL|ERROR)\s*:\s*(.+)$", re.MULTILINE)
FAILED = 255
"""The exit code of a runtime that could not start the container; its starter, in C, has 1."""
BUS_ERROR = (135, -7)

NO_NAMESPACES = (
    "this node forbids user namespaces, which Apptainer needs unless it is installed with setuid. "
    "Ask the administrators for the package apptainer-suid, or exclude the node"
)
NO_FUSE = (
    "this node gives no access to /dev/fuse, with which Apptainer reads a SIF; "
    'use an unpacked image ([container] stage = "unpack"), or exclude the node: \\g<0>'
)
DAMAGED = "the image is damaged or truncated; copy it again, or build it again: \\g<0>"

RUNTIME = (
    Complaint(
        r"could not open image (\S+): failed to retrieve path .*no such file",
        r"the image \1 is not on this node",
        node_at_fault=True,
    ),
    Complaint(
        r"could not open image (\S+): .*image format not recognized",
        r"\1 is not a container image: Apptainer does not recognise its format",
    ),
    Complaint(
        r"could not open image (\S+): (?:.*is not readable by the current user|.*permission denied)",
        r"you may not read the image \1; check it with `ls -l`, and ask its owner for access",
    ),
    Complaint(
        r"the image's architecture \((\S+)\) could not run on the host's \((\S+)\)",
        r"the image is built for \1, but this node is \2; build it on a machine like this node",
        node_at_fault=True,
    ),
    Complaint(
        r"required option --passphrase or --pem-path missing|cannot decrypt",
        "the image is encrypted, and slurmgpu passes no key to tasks; use an unencrypted image",
    ),
    Complaint(
        r"fuse: failed to open /dev/fuse: .*|open(?:ing)? /dev/fuse: .*|fuse: device (?:/dev/fuse )?not found",
        NO_FUSE,
        True,
    ),
    Complaint(
        r"Something went wrong trying to read the squashfs image|reading descriptors: unexpected EOF"
        r"|failed to read SIF partition.*|error while checking squashfs header.*|corrupted image.*"
        r"|bad superblock for squashfs.*|input/output error",
        DAMAGED,
        is_damage=True,
    ),
    Complaint(
        r"mount source (.+?) doesn't exist",
        r"the folder \1, which should be bound into the container, does not exist on this node",
        node_at_fault=True,
    ),
    Complaint(
        r"destination \S+ doesn't exist in container|mount \S+->\S+ error: .*(?:no such file|read-only file system)",
        "the destination of a bind is missing in the container: \\g<0>. Without an overlay in Apptainer, the image "
        "must have the folder. If another mount hides it (strict = true hides the image's /tmp), bind to another "
        "destination",
    ),
    Complaint(
        r"failed to set working directory: chdir (.+?): no such file",
        r"the working folder \1 does not exist inside the container; bind it",
    ),
    Complaint(
        r'"?([^"\n]+?)"?: executable file not found in \$PATH|stat (/\S+): no such file or directory',
        r"the image has no program \1\2; [container] python names the Python in the image",
    ),
    Complaint(
        r"exec format error",
        "the image's program is built for another kind of processor than this node's; "
        "build the image on a machine like this node",
    ),
    Complaint(
        r"not allowed to create user namespace|user namespace requires to set \S+ to 1"
        r"|user namespace (?:disabled|not supported)|maximum number of user namespaces exceeded"
        r"|[Uu]nprivileged user namespaces may not be enabled"
        r"|apparmor_restrict_unprivileged_userns|nesting depth of user namespaces",
        NO_NAMESPACES,
        node_at_fault=True,
    ),
    Complaint(
        r"Requesting capability set",
        "Apptainer as root wants all capabilities, and some are missing here; "
        "set APPTAINER_DROP_CAPS=CAP_SYS_RESOURCE, or run as a normal user",
        node_at_fault=True,
    ),
    Complaint(
        r"unknown userid (\d+)",
        r"this node does not know the user \1 (no entry in passwd or LDAP), which Apptainer needs",
        node_at_fault=True,
    ),
    Complaint(
        r"unknown (?:shorthand )?flag: (\S+)",
        r"the runtime on this node does not know the option \1: it is too old, or a different one",
        node_at_fault=True,
    ),
    Complaint(
        r"no space left on device",
        "a disk is full: the node's /tmp (APPTAINER_TMPDIR names another folder), or the session's 64 MB of memory",
        node_at_fault=True,
        kind="disk_full",
    ),
    Complaint(
        r"while extracting|root filesystem extraction failed",
        "this node has no squashfuse, so Apptainer unpacks the whole image at every start, which failed: "
        'have squashfuse installed, or use [container] stage = "unpack"',
        node_at_fault=True,
    ),
    Complaint(r"permission denied", 'the image\'s program may not be executed; [container] python = "…" names it'),
)
"""Searched in the runtime's own lines: a workload may print such words about its own files."""

SHELL = (
    Complaint(
        # If the kernel cannot execute a program, Apptainer runs it as a script of the image's shell.
        r"(?m)^(/\S+): (?:line )?\d+: (?:[Ss]yntax error|.*not found|.*cannot execute).*",
        "the image's program does not run on this node, perhaps because it is for another kind of processor: \\g<0>",
    ),
    Complaint(r"source: read /\.singularity\.d/\S+: input/output error", DAMAGED, is_damage=True),
)
"""Searched in all lines: messages of the image's shell, in which the runtime starts a program."""


BUILD = {
    r"no space left on device": "a disk is full. The build works in /tmp; APPTAINER_TMPDIR names another folder, which "
    "must be on a local disk, and needs three times the image's size",
    r"CERTIFICATE_VERIFY_FAILED|x509: certificate signed by unknown authority": "a server's certificate is not known; "
    "if this network has its own authority, docs/how-to/build-an-image.md says how to add its certificate",
    r"toomanyrequests|TOOMANYREQUESTS": "the registry has served this address too often today; "
    "log in (`apptainer registry login`), or give another base with --base",
    r"manifest unknown|MANIFEST_UNKNOWN|requested access to the resource is denied": "the registry has no such base "
    "image; name another with --base",
    r"no such host|Temporary failure (?:in name )?resol|Network is unreachable|i/o timeout|connection refused": "there "
    "is no connection to the registry or to PyPI. Build on a machine that has one, or offline: --base BASE.sif, and "
    "wheels with --bind WHEELS:/mnt:ro",
    r"No matching distribution found for (\S+)": r"pip finds no package \1, or none for the image's Python; "
    r"offline, it must be among the wheels in /mnt",
    r"failed to change uid|set_attributes": "files in the base image have owners other than root, so a normal user "
    "cannot unpack it. Build the base with --mksquashfs-args -all-root, or use one from a registry",
    r"searching for mksquashfs": "mksquashfs is not on PATH: install squashfs-tools, or build on another machine",
    r"newuidmap was not found": "this machine lists you in /etc/subuid, but lacks newuidmap (package uidmap): "
    "have it installed, or build on another machine",
    r"not allowed to create user namespace|user namespace (?:disabled|not supported)|apparmor_restrict_unprivileged":
    "this machine forbids user namespaces; without them only root can build. Build on another machine",
    r"Requesting capability set": "Apptainer as root wants all capabilities, and some are missing here: build from an "
    "unpacked base, or set APPTAINER_DROP_CAPS, or build as a normal user",
    r"unknown flag: (\S+)": r"this version is too old: it does not know \1; Apptainer 1.2 does",
}  # fmt: skip
"""Messages of failed builds, and what they mean."""

NO_CAUSE = re.compile(r"(INFO|WARNING|VERBOSE|DEBUG)\b|\++ ")
"""Lines of a build that name no cause: progress, and the commands of its script as a shell prints them."""
BUILD_LAST_WORD = re.compile(r"(?:FATAL|ERROR)\s*:\s*(.+)")
WRAPPER = re.compile(r"While performing build: .*\bexit status \d+$")
"""Apptainer's message for any script that fails."""


def explain(said: str, returncode: int) -> ContainerError | None:
    """Why a worker ended without an event, from its stderr; None if the container is not the cause.

    `returncode` is as in `subprocess`: the runtime itself fails with 255, its starter with 1.
    """
    lines = without_escapes(said).splitlines()
    of_runtime = "\n".join(line for line in lines if RUNTIME_LINE.match(line))
    found = find_complaint("\n".join(lines), (*SHELL, *INTERPRETER)) or find_complaint(of_runtime, RUNTIME)
    if found is not None:
        return found
    if returncode in BUS_ERROR:
        return ContainerError(
            "the worker died of a bus error at its start. Either a signal ended the process that serves the image "
            '(squashfuse_ll; [container] stage = "unpack" does without it), or the image changed while in use, '
            "or /dev/shm is full",
            node_at_fault=True,
        )
    if returncode == FAILED:
        words = LAST_WORD.findall(of_runtime)
        return ContainerError(
            f"the container did not start: {words[-1].strip()}"
            if words
            else "the container did not start, and the runtime said nothing (exit code 255)"
        )
    return None


def why_build_failed(said: str) -> str | None:
    """Why a build failed, from its output; its last message if the cause is unknown."""
    for pattern, meaning in BUILD.items():
        if match := re.search(pattern, said):
            return match.expand(meaning)
    lines = [line.strip() for line in said.splitlines() if line.strip() and not NO_CAUSE.match(line)]
    words = [match[1] for line in lines if (match := BUILD_LAST_WORD.match(line))]
    causes = [word for word in words if not WRAPPER.match(word)]
    said_else = [line for line in lines if not BUILD_LAST_WORD.match(line)]
    return next((found[-1] for found in (causes, said_else, words) if found), None)
