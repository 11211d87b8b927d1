"""What a container runtime, or an interpreter that cannot start, wrote to stderr, as a sentence and a failure class."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slurmgpu.containers.settings import ContainerError
from slurmgpu.util.ansi import without_escapes

RUNTIME_LINE = re.compile(r"^(FATAL|ERROR|Error for command)\b")
LAST_WORD = re.compile(r"^(?:FATAL|ERROR)\s*:\s*(.+)$", re.MULTILINE)
FAILED = 255
"""The exit code of a runtime that could not start the container; its starter, in C, has 1."""
BUS_ERROR = (135, -7)


@dataclass(frozen=True)
class Complaint:
    """A text that is looked for, and what it means, in which a group of the pattern may stand."""

    pattern: str
    meaning: str
    node_at_fault: bool = False
    kind: str = "container"


NO_NAMESPACES = (
    "this node forbids user namespaces, which Apptainer needs unless it is installed with setuid. "
    "Ask the administrators for the package apptainer-suid, or exclude the node"
)
NO_FUSE = (
    "this node gives no /dev/fuse, by which Apptainer reads a SIF; "
    'use an unpacked image ([container] stage = "unpack"), or exclude the node: \\g<0>'
)
DAMAGED = "the image is damaged or cut short; copy it again, or build it again: \\g<0>"

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
        r"you may not read the image \1; `ls -l` it, and let its owner give you access",
    ),
    Complaint(
        r"the image's architecture \((\S+)\) could not run on the host's \((\S+)\)",
        r"the image is built for \1, and this node is \2; build it on a machine like this node",
        node_at_fault=True,
    ),
    Complaint(
        r"required option --passphrase or --pem-path missing|cannot decrypt",
        "the image is encrypted, and slurmgpu hands no key to a task; use an image that is not",
    ),
    Complaint(r"fuse: failed to open /dev/fuse: .*|open(?:ing)? /dev/fuse: .*|fuse: device not found", NO_FUSE, True),
    Complaint(
        r"Something went wrong trying to read the squashfs image|reading descriptors: unexpected EOF"
        r"|failed to read SIF partition.*|error while checking squashfs header.*|corrupted image.*"
        r"|bad superblock for squashfs.*|input/output error",
        DAMAGED,
    ),
    Complaint(
        r"mount source (.+?) doesn't exist",
        r"the folder \1, which is to be bound into the container, does not exist on this node",
        node_at_fault=True,
    ),
    Complaint(
        r"destination \S+ doesn't exist in container|mount \S+->\S+ error: .*(?:no such file|read-only file system)",
        "a bind has no place in the container: \\g<0>. Where Apptainer has no overlay, the image must have the "
        "folder. If it has it, and another mount hides it (strict = true hides the image's /tmp), bind it elsewhere",
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
        r"this node does not know the user \1 (no entry in passwd or LDAP), and Apptainer refuses to work without one",
        node_at_fault=True,
    ),
    Complaint(
        r"unknown (?:shorthand )?flag: (\S+)",
        r"the runtime on this node is too old, or another one: it does not know the option \1",
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
        "this node has no squashfuse, so that Apptainer unpacks the whole image at every start, and that failed: "
        'have squashfuse installed, or use [container] stage = "unpack"',
        node_at_fault=True,
    ),
    Complaint(r"permission denied", 'the image\'s program may not be executed; [container] python = "…" names it'),
)
"""Looked for in the lines of the runtime alone: a workload may print such words about its own files."""

INTERPRETER = (
    Complaint(
        # What the kernel cannot execute Apptainer gives to the image's shell to read.
        r"(?m)^(/\S+): (?:line )?\d+: (?:[Ss]yntax error|.*not found|.*cannot execute).*",
        "the image's program does not run on this node, perhaps as it is for another kind of processor: \\g<0>",
    ),
    Complaint(r"slurmgpu needs Python 3\.\d+ or newer, and this is \d+\.\d+", "in the image: \\g<0>"),
    Complaint(r"source: read /\.singularity\.d/\S+: input/output error", DAMAGED),
    Complaint(r"No module named '(numpy|h5py)'", r"the image has no \1; a worker needs NumPy and h5py in it"),
    Complaint(
        r"No module named 'encodings'",
        "the image's Python does not find its own library: PYTHONHOME is set in the image, or a bind hides it",
    ),
    Complaint(
        r"version `(GLIBC_[\d.]+)' not found \(required by (\S+)\)",
        r"\2 needs a newer C library than the image has (\1); build the image on a newer base",
    ),
    Complaint(
        r"error while loading shared libraries: (\S+):",
        r"the image lacks the library \1, which its Python needs",
    ),
)
"""Looked for everywhere, when a worker ended before it said a word."""


def explain(text: str, returncode: int) -> ContainerError | None:
    """What `text`, the stderr of a worker that never said a word, means; None if the container is not to blame.

    `returncode` as in `subprocess`: the runtime itself fails with 255, its starter with 1.
    """
    lines = without_escapes(text).splitlines()
    said = "\n".join(line for line in lines if RUNTIME_LINE.match(line))
    for source, complaints in (("\n".join(lines), INTERPRETER), (said, RUNTIME)):
        for complaint in complaints:
            if match := re.search(complaint.pattern, source):
                sentence = match.expand(complaint.meaning)
                return ContainerError(sentence, kind=complaint.kind, node_at_fault=complaint.node_at_fault)
    if returncode in BUS_ERROR:
        return ContainerError(
            "the worker died of a bus error as it started: a signal ended the process that serves the image "
            '(squashfuse_ll; [container] stage = "unpack" does without it), the image changed under it, '
            "or /dev/shm is full",
            node_at_fault=True,
        )
    if returncode == FAILED:
        words = LAST_WORD.findall(said)
        return ContainerError(
            f"the container did not start: {words[-1].strip()}"
            if words
            else "the container did not start, and the runtime said nothing (exit code 255)"
        )
    return None
