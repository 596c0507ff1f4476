#!/usr/bin/env python3
"""Have the source of an engine on this host, at exactly one commit, with everything its build would fetch.

Runs on the host with any Python >= 3.8 and git, standard library only. With --stdin, one JSON object:

    repo         address of the repository                                                    required
    commit       the commit (40 hex digits)                                                   required
    dest         folder of the work tree                                                      required
    deps         folder for the build-time dependencies (CMake's FETCHCONTENT_BASE_DIR)       required
    ref          a tag or branch that holds the commit, for servers that refuse bare commits
    archive      a tar of a clone (or of an export, with `tree`) to use instead of the network
    tree         git's id of the commit's tree: what proves an archive without .git
    archives     folder with NAME.tar of clones of the dependencies (a bundle)
    mirrors      [[prefix, replacement]]: addresses to try first; what they serve is verified
    http_version "HTTP/1.1" for lines that break long HTTP/2 transfers
    target       the build's target device: CMake files of other devices are left out (default "cuda")
    skip         dependencies that this build does not need
    pins         {dependency: commit}: what a tag must resolve to
    offline      true: ask no server

A work tree that is at its commit already is kept as it is, so that a build goes on where it was. Git ids are
digests of what they name: content from a mirror or an archive is unpacked into a repository of its own and
only taken over by `git fetch`, which hashes every object anew. Hooks and configuration of an archive are
never used. A dependency's tag is a name and no digest, so it is asked of its own server first; the commit
that it stood for is in the answer.

stdout: {"commit", "tree", "how", "changed", "dependencies": [{"name", "repo", "ref", "commit", "path", "how",
"proven"}], "seconds"} or {"error": {"id", "what", "file", "fix"}} with exit status 1. Ids: usage (status 2),
git_missing, unreachable, wrong_commit, unproven, damaged, cmake, disk_full, permission, system.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import sys
import tarfile
import time
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

try:
    from .shared import NO_ROOM, Problem, mirrored, of_the_system, redact
except ImportError:  # a program on a host: its neighbours are in the same folder, not in a package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from shared import NO_ROOM, Problem, mirrored, of_the_system, redact  # type: ignore[import-not-found,no-redef]

WHOLE = "rackwright-whole"
ATTEMPTS = 2
# other devices' files declare dependencies that this build never reads (vLLM: cmake/cpu_extension.cmake)
DEVICES = ("cpu", "cuda", "rocm", "hip", "xpu", "tpu")


class Dependency(NamedTuple):
    """What a CMake file says it fetches. `submodules` None: all of them."""

    name: str
    repo: str
    ref: str
    submodules: Optional[Tuple[str, ...]]
    where: str

    @property
    def folder(self) -> str:
        """The folder below FETCHCONTENT_BASE_DIR where CMake looks for it."""
        return self.name.lower() + "-src"


def is_commit(ref: str) -> bool:
    """The ref is a full commit id."""
    return re.fullmatch(r"[0-9a-f]{40}", ref) is not None


# ---------------------------------------------------------------- pure: CMake files


def without_comments(text: str) -> str:
    """CMake text with its comments blanked (`#` to the line's end and `#[[ ]]`), strings kept."""
    out: List[str] = []
    at = 0
    while at < len(text):
        char = text[at]
        if char == '"':
            end = at + 1
            while end < len(text) and text[end] != '"':
                end += 2 if text[end] == "\\" else 1
            out.append(text[at : end + 1])
            at = end + 1
        elif char == "#":
            bracket = re.match(r"#\[(=*)\[", text[at:])
            closing = "]" + bracket[1] + "]" if bracket else "\n"
            end = text.find(closing, at)
            end = len(text) if end < 0 else end + (len(closing) if bracket else 0)
            at = end
        else:
            out.append(char)
            at += 1
    return "".join(out)


def commands(text: str) -> Iterator[Tuple[str, List[str]]]:
    """Each command of a CMake file: its name in lower case and its words."""
    clean = without_comments(text)
    for found in re.finditer(r"(?m)^[ \t]*([A-Za-z_]\w*)[ \t]*\(", clean):
        depth, end, quoted = 1, found.end(), False
        while end < len(clean) and depth:
            char = clean[end]
            if char == "\\" and quoted:
                end += 1
            elif char == '"':
                quoted = not quoted
            elif not quoted:
                depth += {"(": 1, ")": -1}.get(char, 0)
            end += 1
        words = re.findall(r'"((?:[^"\\]|\\.)*)"|([^\s"()]+)', clean[found.end() : end - 1])
        yield found[1].lower(), [quoted_word or plain for quoted_word, plain in words]


def expand(word: str, variables: Dict[str, str]) -> str:
    """`${NAME}` replaced by what the tree sets it to; unknown ones stay."""
    for _ in range(8):
        new = re.sub(r"\$\{(\w+)\}", lambda found: variables.get(found[1], found[0]), word)
        if new == word:
            break
        word = new
    return word


def declared(text: str, where: str) -> List[Dependency]:
    """The git dependencies that one CMake file declares or populates. A value that is not there is ""."""
    variables: Dict[str, str] = {}
    found: List[Dependency] = []
    for command, words in commands(text):
        if command == "set" and len(words) >= 2 and words[0] not in variables:
            variables[words[0]] = words[1]
        if command not in ("fetchcontent_declare", "fetchcontent_populate", "externalproject_add"):
            continue
        if "GIT_REPOSITORY" not in words or "GIT_TAG" not in words:
            continue
        # the word after each, where there is one
        repo = expand("".join(words[words.index("GIT_REPOSITORY") + 1 :][:1]), variables)
        ref = expand("".join(words[words.index("GIT_TAG") + 1 :][:1]), variables)
        submodules: Optional[Tuple[str, ...]] = None
        if "GIT_SUBMODULES" in words:
            listed = []
            for word in words[words.index("GIT_SUBMODULES") + 1 :]:
                if re.fullmatch(r"[A-Z][A-Z_]+", word):
                    break
                listed.append(word)
            submodules = tuple(part for part in ";".join(listed).split(";") if part)
        found.append(Dependency(expand(words[0], variables), repo, ref, submodules, where))
    return found


def dependencies_of(tree: str, target: str, skip: List[str]) -> List[Dependency]:
    """The git dependencies of a source tree: its CMakeLists.txt and every file below cmake/.

    Two different declarations of one name, or a value that the tree does not set, are a Problem.
    """
    files = [os.path.join(tree, "CMakeLists.txt")]
    for folder, _, names in sorted(os.walk(os.path.join(tree, "cmake"))):
        files += [os.path.join(folder, name) for name in sorted(names) if name.endswith(".cmake")]
    others = tuple(device + "_" for device in DEVICES if device != target)
    chosen: Dict[str, Dependency] = {}
    for file in files:
        if os.path.basename(file).startswith(others) or not os.path.isfile(file):
            continue
        with open(file, encoding="utf-8", errors="replace") as stream:
            text = stream.read()
        for one in declared(text, os.path.relpath(file, tree)):
            if one.name.lower() in [name.lower() for name in skip]:
                continue
            before = chosen.get(one.name.lower())
            if "$" in one.repo + one.ref or not one.repo or not one.ref:
                what = "%s declares %s at %s %s, and the tree does not say what that is" % (
                    one.where, one.name, one.repo, one.ref,
                )  # fmt: skip
                raise Problem("cmake", what, "name it under `skip` or pin it in the recipe", one.where)
            if before and (before.repo, before.ref) != (one.repo, one.ref):
                what = "%s is declared twice: %s in %s, %s in %s" % (
                    one.name, before.ref, before.where, one.ref, one.where,
                )  # fmt: skip
                raise Problem("cmake", what, "name it under `skip`, or set the build's target", one.where)
            chosen[one.name.lower()] = one
    return list(chosen.values())


# ---------------------------------------------------------------- progress, processes


class Reporter:
    """Progress lines on stderr, at most two a second."""

    def __init__(self) -> None:
        self.shown, self.position, self.repos, self.total = 0.0, 0, 0, 1

    def show(self, note: str, share: float = 0.0, force: bool = False) -> None:
        """How far: repositories done, and the present one's share."""
        if force or time.monotonic() - self.shown >= 0.5:
            self.shown = time.monotonic()
            state = {
                "phase": "fetch source", "done": round(self.repos + share, 2), "total": self.total,
                "unit": "repositories", "note": note,
            }  # fmt: skip
            print("#progress " + json.dumps(state), file=sys.stderr, flush=True)

    @staticmethod
    def log(line: str) -> None:
        """A line for the log."""
        print(redact(line), file=sys.stderr, flush=True)


GIT = ("git", "-c", "core.hooksPath=/dev/null", "-c", "protocol.file.allow=always", "-c", "safe.directory=*",
       "-c", "advice.detachedHead=false", "-c", "gc.auto=0", "-c", "http.lowSpeedLimit=1000",
       "-c", "http.lowSpeedTime=60", "-c", "core.autocrlf=false", "-c", "core.fsmonitor=")  # fmt: skip


class Git:
    """git with this run's settings."""

    def __init__(self, http_version: Optional[str], report: Reporter) -> None:
        self.base = [*GIT, *(["-c", "http.version=" + http_version] if http_version else [])]
        self.report = report
        self.env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_DIR")}
        self.env.update(GIT_TERMINAL_PROMPT="0", GIT_LFS_SKIP_SMUDGE="1", LC_ALL="C")

    def ask(self, folder: str, *words: str) -> Optional[str]:
        """stdout of a git command in a folder, None when it fails."""
        done = subprocess.run(
            [*self.base, "-C", folder, *words], env=self.env, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
        return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else None

    def do(self, folder: str, *words: str, note: str = "") -> Optional[str]:
        """Run a git command, showing its progress. None when it worked, else its last words."""
        argv = [*self.base, "-C", folder, *words]
        tail: List[str] = []
        with subprocess.Popen(
            argv, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as child:
            assert child.stdout is not None
            pipe, rest = child.stdout.fileno(), b""
            while True:
                if select.select([pipe], [], [], 5.0)[0]:
                    block = os.read(pipe, 65536)
                    if not block:
                        break
                    *lines, rest = re.split(rb"[\r\n]", rest + block)
                    for raw in lines:
                        line = raw.decode("utf-8", "replace").strip()
                        share = re.match(r"(?:remote: )?(Receiving|Resolving|Updating)\D*(\d+)%", line)
                        if share:
                            part = int(share[2]) / 100 * (0.8 if share[1] == "Receiving" else 0.95)
                            self.report.show("%s: %s" % (note, line[:90]), part)
                        elif line:
                            tail = [*tail[-12:], line]
                self.report.show(note, 0.0)
            if rest.strip():
                tail.append(rest.decode("utf-8", "replace").strip())
            if child.wait() == 0:
                return None
        return " | ".join(tail[-4:]) or "git ended with status %d" % child.returncode


# ---------------------------------------------------------------- one repository


class Wanted(NamedTuple):
    """One repository at one ref. `archive` is a folder with a clone that was unpacked, if there is one."""

    name: str
    repo: str
    ref: str
    also: Optional[str]
    dest: str
    archive: Optional[str]
    submodules: Optional[Tuple[str, ...]]


class Obtained(NamedTuple):
    """What was had: its commit, from where, and whether the commit was known before (`proven`)."""

    commit: str
    how: str
    proven: bool


class Fetcher:
    """Brings repositories to their commits."""

    def __init__(self, git: Git, mirrors: List[List[str]], offline: bool, report: Reporter) -> None:
        self.git, self.mirrors, self.offline, self.report = git, mirrors, offline, report
        self.changed = False

    def bring(self, wanted: Wanted, pin: Optional[str] = None) -> Obtained:
        """Have the repository at `dest`, at its commit, with its submodules. Problem when that cannot be."""
        expected = wanted.ref if is_commit(wanted.ref) else pin
        kept = self.kept(wanted.dest, expected, wanted.ref)
        if kept:
            return Obtained(kept.commit, kept.how, expected is not None)
        if os.path.isdir(wanted.dest) and not os.path.isdir(os.path.join(wanted.dest, ".git")):
            shutil.rmtree(wanted.dest)
        os.makedirs(wanted.dest, exist_ok=True)
        if not os.path.isdir(os.path.join(wanted.dest, ".git", "objects")):
            must(self.git.do(wanted.dest, "init", "-q"), wanted.dest)
        self.forget(wanted.dest)
        commit, how = self.fetch(wanted, expected)
        problem = self.git.do(
            wanted.dest, "checkout", "--force", "--detach", "--progress", commit, note=wanted.name
        )
        must(problem, wanted.dest)
        head = self.git.ask(wanted.dest, "rev-parse", "HEAD")
        if head != commit:
            raise Problem("wrong_commit", "%s is at %s, not %s" % (wanted.dest, head, commit), "run again")
        for path, url, sha in self.submodules(wanted):
            inner = Wanted(
                wanted.name + "/" + path, url, sha, None, os.path.join(wanted.dest, path),
                without_links(wanted.archive, path), None,
            )  # fmt: skip
            self.bring(inner)
        with open(os.path.join(wanted.dest, ".git", WHOLE), "w", encoding="utf-8") as stream:
            stream.write(json.dumps({"commit": commit, "ref": wanted.ref, "how": how}))
        self.changed = True
        return Obtained(commit, how, expected is not None)

    def kept(self, dest: str, expected: Optional[str], ref: str) -> Optional[Obtained]:
        """A work tree that is whole and at its commit; changed files are put back. Else None."""
        try:
            with open(os.path.join(dest, ".git", WHOLE), encoding="utf-8") as stream:
                mark = json.load(stream)
            was = Obtained(mark["commit"], mark["how"], True)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        head = self.git.ask(dest, "rev-parse", "HEAD")
        if not head or was.commit != head or mark.get("ref") != ref or (expected and head != expected):
            return None
        changed = self.git.ask(dest, "diff", "--name-only", "--ignore-submodules=all", "HEAD")
        if changed is None:
            return None
        if changed:
            self.report.log("%s: putting back %s" % (dest, changed.replace("\n", ", ")[:300]))
            if self.git.do(dest, "checkout", "--force", "HEAD", "--", "."):
                return None
        return was

    @staticmethod
    def forget(dest: str) -> None:
        """What a killed git left: its locks, and the mark of a tree that is about to change."""
        for name in (WHOLE, "index.lock", "shallow.lock", "HEAD.lock"):
            path = os.path.join(dest, ".git", name)
            if os.path.exists(path):
                os.unlink(path)

    def fetch(self, wanted: Wanted, expected: Optional[str]) -> Tuple[str, str]:
        """Have the objects in the repository. Returns the commit and where it came from."""
        if (
            expected
            and self.git.ask(wanted.dest, "cat-file", "-t", expected) == "commit"
            and (self.git.ask(wanted.dest, "fsck", "--connectivity-only", expected) is not None)
        ):
            return expected, "kept"
        tried: List[str] = []
        if wanted.archive and os.path.isdir(os.path.join(wanted.archive, ".git")):
            here = self.from_archive(wanted, expected)
            if here:
                return here, "archive"
            tried.append("the archive holds another commit than %s" % (expected or wanted.ref))
        near = mirrored(wanted.repo, self.mirrors)
        # a mirror could say anything about a tag, but nothing wrong about a commit
        urls = [*near, wanted.repo] if expected else [wanted.repo, *near]
        for url in [] if self.offline else urls:
            refs = [ref for ref in (expected, wanted.ref, wanted.also) if ref]
            for ref in dict.fromkeys(refs):
                for attempt in range(ATTEMPTS):
                    why = self.git.do(
                        wanted.dest,
                        "fetch",
                        "--depth",
                        "1",
                        "--no-tags",
                        "--progress",
                        "--",
                        url,
                        ref,
                        note=wanted.name,
                    )
                    if why is None or "not our ref" in why or "couldn't find remote ref" in why:
                        break
                    self.report.log("%s: %s" % (url, why))
                    time.sleep(2 * (attempt + 1))
                if why is not None:
                    tried.append("%s %s: %s" % (redact(url), ref[:12], why[-200:]))
                    continue
                got = self.git.ask(wanted.dest, "rev-parse", "FETCH_HEAD^{commit}")
                if got and (expected is None or got == expected):
                    return got, "mirror" if url != wanted.repo else "git"
                tried.append("%s %s is commit %s" % (redact(url), ref, got))
        raise self.refusal(wanted, expected, tried)

    def from_archive(self, wanted: Wanted, expected: Optional[str]) -> Optional[str]:
        """Take a commit over from an unpacked clone; git hashes every object on the way."""
        assert wanted.archive is not None
        ref = expected or (
            wanted.ref
            if self.git.ask(wanted.archive, "rev-parse", "--verify", "-q", wanted.ref + "^{commit}")
            else "HEAD"
        )
        upload = "git -c uploadpack.allowAnySHA1InWant=true -c safe.directory=* upload-pack"
        why = self.git.do(
            wanted.dest, "fetch", "--depth", "1", "--no-tags", "--upload-pack", upload, wanted.archive, ref,
            note=wanted.name + " from the archive",
        )  # fmt: skip
        if why is not None:
            self.report.log("archive of %s: %s" % (wanted.name, why))
            return None
        got = self.git.ask(wanted.dest, "rev-parse", "FETCH_HEAD^{commit}")
        return got if got and (expected is None or got == expected) else None

    @staticmethod
    def refusal(wanted: Wanted, expected: Optional[str], tried: List[str]) -> Problem:
        """Nobody had it: say whether that is a wrong commit or a wrong line."""
        wrong = any("archive holds" in line or " is commit " in line for line in tried)
        ref = expected or wanted.ref
        what = "%s at %s cannot be had: %s" % (wanted.name, ref, "; ".join(tried) or "offline")
        if wrong:
            return Problem(
                "wrong_commit", what, "make the archive from a clone that has %s checked out" % ref
            )
        fix = "set url_mirrors, or upload a tar of a clone and name it (source_archive), or use a bundle"
        return Problem("unreachable", what, fix)

    def submodules(self, wanted: Wanted) -> List[Tuple[str, str, str]]:
        """(path, url, commit) of the submodules that are wanted."""
        listed = self.git.ask(wanted.dest, "config", "-f", ".gitmodules", "--get-regexp", r"\.(path|url)$")
        values: Dict[str, Dict[str, str]] = {}
        for line in (listed or "").splitlines():
            key, _, value = line.partition(" ")
            values.setdefault(key.rsplit(".", 1)[0], {})[key.rsplit(".", 1)[1]] = value
        found = []
        for part in values.values():
            path, url = part.get("path", ""), part.get("url", "")
            if not path or (wanted.submodules is not None and path not in wanted.submodules):
                continue
            entry = self.git.ask(wanted.dest, "ls-tree", "HEAD", "--", path) or ""
            if entry.startswith("160000 commit "):
                found.append((path, joined(wanted.repo, url), entry.split()[2]))
        return found


def must(why: Optional[str], folder: str) -> None:
    """A local git command has to work."""
    if why is None:
        return
    if "No space left" in why or "quota exceeded" in why:
        raise Problem("disk_full", why, "free space there and run again", folder)
    if "ermission denied" in why:
        raise Problem("permission", why, "let this user write there", folder)
    raise Problem("damaged", "%s: %s" % (folder, why), "remove %s and run again" % folder)


def without_links(archive: Optional[str], path: str) -> Optional[str]:
    """A folder of an unpacked archive, None where a link of the archive stands in its path."""
    if archive is None:
        return None
    straight = os.path.join(os.path.realpath(archive), os.path.normpath(path))
    return straight if os.path.realpath(straight) == straight else None


def joined(base: str, url: str) -> str:
    """A submodule's address: relative ones are relative to the repository's."""
    if not url.startswith(("./", "../")):
        return url
    left = base.rstrip("/")
    while url.startswith(("./", "../")):
        if url.startswith("../"):
            left, url = left.rsplit("/", 1)[0], url[3:]
        else:
            url = url[2:]
    return left + "/" + url


# ---------------------------------------------------------------- archives


def stays_inside(member: tarfile.TarInfo, links: Set[str]) -> bool:
    """Whether a member is written inside of the folder that it is unpacked into.

    `links` are the symbolic links so far; this one is added. Nothing is ever written through a link: what a
    chain of links means is not for us to compute (CVE-2025-4517), and a tar of a folder has no such member.
    """
    paths = [member.name, *([member.linkname] if member.islnk() else [])]
    for path in paths:
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if path.startswith("/") or ".." in parts:
            return False
        if any("/".join(parts[: depth + 1]) in links for depth in range(len(parts))):
            return False
    if member.issym():
        name = os.path.normpath(member.name)
        links.add(name)
        target = os.path.normpath(os.path.join(os.path.dirname(name), member.linkname))
        return not target.startswith("/") and target.split("/")[0] != ".."
    return not member.isdev()


def unpack(archive: str, into: str) -> str:
    """Unpack a tar that nothing has proved yet, and return the folder that holds the tree.

    Only below `into` is anything written, and what is there configures no git that looks at it.
    """
    shutil.rmtree(into, ignore_errors=True)
    os.makedirs(into)
    fix = "make the archive anew: git clone --depth 1 --branch TAG URL d && tar -czf d.tar.gz d"
    links: Set[str] = set()
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                if not stays_inside(member, links):
                    raise Problem("damaged", "%s holds %s, outside of itself" % (archive, member.name), fix)
                member.uid, member.gid = os.getuid(), os.getgid()
                member.mode = (member.mode | (0o700 if member.isdir() else 0o600)) & 0o755
                tar.extract(member, into, numeric_owner=True)
    except (tarfile.TarError, EOFError, OSError) as error:
        if getattr(error, "errno", None) in NO_ROOM:
            raise
        raise Problem("damaged", "%s cannot be unpacked: %s" % (archive, error), fix, archive) from error
    disarm(into)
    if os.path.isdir(os.path.join(into, ".git")) or os.path.isfile(os.path.join(into, "CMakeLists.txt")):
        return into
    inner = [os.path.join(into, name) for name in os.listdir(into)]
    folders = [path for path in inner if os.path.isdir(path) and not os.path.islink(path)]
    return folders[0] if len(folders) == 1 else into


def disarm(folder: str) -> None:
    """Take away what would let an unproved clone run programs: its configuration, and .git that points away.

    git runs commands that a repository's configuration names, also when it only reads (core.fsmonitor; the
    upload-pack of a promisor remote, CVE-2024-32004).
    """
    for here, folders, files in os.walk(folder):
        git = os.path.join(here, ".git")
        if ".git" not in folders + files:
            continue
        if os.path.islink(git) or not os.path.isdir(git):
            os.unlink(git)
            continue
        folders.remove(".git")
        for name in ("config", "config.worktree", "commondir", "hooks"):
            path = os.path.join(git, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            elif os.path.lexists(path):
                os.unlink(path)
        with open(os.path.join(git, "config"), "x", encoding="utf-8") as stream:
            stream.write("[core]\n\trepositoryformatversion = 0\n\tbare = false\n")


def export_as_clone(git: Git, folder: str, commit: str, tree: Optional[str], archive: str) -> str:
    """Prove a tree without .git by git's id of it, and make it a repository of its own.

    Returns a commit id that stands for it: not the real one, whose text an export does not hold.
    """
    if tree is None:
        what = "%s holds no .git, so nothing in it proves that it is commit %s" % (archive, commit)
        raise Problem(
            "unproven", what, "make it from a clone with its .git, or pin `tree` in the recipe", archive
        )
    for words in (("init", "-q"), ("add", "--all", "--force", ".")):
        must(git.do(folder, *words), folder)
    found = git.ask(folder, "write-tree")
    if found != tree:
        what = "%s is tree %s, commit %s has tree %s" % (archive, found, commit, tree)
        raise Problem("wrong_commit", what, "export exactly that commit, or use a clone", archive)
    identity = ("-c", "user.name=rackwright", "-c", "user.email=rackwright@localhost")
    why = git.do(folder, *identity, "commit", "-q", "--no-verify", "-m", commit)
    head = git.ask(folder, "rev-parse", "HEAD")
    must(why, folder)
    if head is None:
        raise Problem("damaged", "%s has no HEAD" % folder, "run again")
    return head


# ---------------------------------------------------------------- the whole


def bring_about(request: Dict[str, Any], report: Reporter) -> Dict[str, Any]:
    """Source and dependencies as asked for; the answer document."""
    began = time.monotonic()
    if shutil.which("git") is None:
        raise Problem("git_missing", "this host has no git", "apt-get install -y git")
    git = Git(request["http_version"], report)
    fetcher = Fetcher(git, request["mirrors"], request["offline"], report)
    dest, commit = request["dest"], request["commit"]
    scratch = dest.rstrip("/") + ".unpacked"
    os.makedirs(os.path.dirname(dest), exist_ok=True)
    os.makedirs(request["deps"], exist_ok=True)
    stands_for, clone = commit, None
    try:
        if fetcher.kept(dest, None if request["tree"] else commit, commit) is None and request["archive"]:
            report.show("unpacking %s" % os.path.basename(request["archive"]), force=True)
            clone = unpack(request["archive"], scratch)
            if not os.path.isdir(os.path.join(clone, ".git")):
                stands_for = export_as_clone(git, clone, commit, request["tree"], request["archive"])
        if stands_for != commit:
            wanted = Wanted("source", request["repo"], stands_for, None, dest, clone, None)
        else:
            wanted = Wanted("source", request["repo"], commit, request["ref"], dest, clone, None)
        before = fetcher.kept(dest, None, commit) if request["tree"] else None
        main = before or fetcher.bring(wanted)
        if before is None and stands_for != commit:
            with open(os.path.join(dest, ".git", WHOLE), "w", encoding="utf-8") as stream:
                stream.write(json.dumps({"commit": stands_for, "ref": commit, "how": "archive"}))
        report.repos = 1
        listed = dependencies_of(dest, request["target"], request["skip"])
        report.total = 1 + len(listed)
        rows = []
        for one in listed:
            rows.append(bring_dependency(fetcher, one, request, dest + ".dependency"))
            report.repos += 1
            report.show(one.name, force=True)
    finally:
        for folder in (scratch, dest + ".dependency"):
            shutil.rmtree(folder, ignore_errors=True)
    for row in rows:
        if not row["proven"]:
            report.log(
                "%s: tag %s was commit %s; the recipe can pin it" % (row["name"], row["ref"], row["commit"])
            )
    return {
        "commit": commit,
        "tree": git.ask(dest, "rev-parse", "HEAD^{tree}"),
        "how": main.how,
        "changed": fetcher.changed,
        "dependencies": rows,
        "seconds": round(time.monotonic() - began, 1),
    }


def bring_dependency(
    fetcher: Fetcher, one: Dependency, request: Dict[str, Any], scratch: str
) -> Dict[str, Any]:
    """One dependency, where CMake looks for it."""
    clone = None
    dest = os.path.join(request["deps"], one.folder)
    pin = request["pins"].get(one.name) or request["pins"].get(one.name.lower())
    expected = one.ref if is_commit(one.ref) else pin
    archive = os.path.join(request["archives"], one.folder + ".tar") if request["archives"] else None
    if archive and os.path.isfile(archive) and fetcher.kept(dest, expected, one.ref) is None:
        clone = unpack(archive, scratch)
    had = fetcher.bring(Wanted(one.name, one.repo, one.ref, None, dest, clone, one.submodules), pin)
    return {
        "name": one.name, "repo": redact(one.repo), "ref": one.ref, "commit": had.commit, "path": dest,
        "how": had.how, "proven": had.proven,
    }  # fmt: skip


DEFAULTS: Dict[str, Any] = {
    "ref": None, "archive": None, "tree": None, "archives": None, "mirrors": [], "http_version": None,
    "target": "cuda", "skip": [], "pins": {}, "offline": False,
}  # fmt: skip


def parse_request(text: str) -> Dict[str, Any]:
    """Check the parameters; a mistake is a Problem with id "usage"."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise Problem("usage", "stdin is not JSON: %s" % error, "see --help") from error
    known = {*DEFAULTS, "repo", "commit", "dest", "deps"}
    if not isinstance(given, dict) or set(given) - known:
        unknown = sorted(set(given) - known) if isinstance(given, dict) else ["no object"]
        raise Problem("usage", "unknown parameter: %s" % unknown[0], "see --help")
    for name in ("repo", "commit", "dest", "deps"):
        if not isinstance(given.get(name), str) or not given[name]:
            raise Problem("usage", "%s must be given" % name, "see --help")
    if not is_commit(given["commit"]):
        raise Problem("usage", "commit must be 40 hex digits: a name can move", "see --help")
    if not os.path.isabs(given["dest"]) or not os.path.isabs(given["deps"]):
        raise Problem("usage", "dest and deps must be absolute paths", "see --help")
    for name in ("repo", "ref"):
        if str(given.get(name) or "").startswith("-"):
            raise Problem("usage", "%s must not begin with -" % name, "see --help")
    return {**DEFAULTS, **given}


def main(arguments: List[str]) -> int:
    """Entry point; see the module's docstring."""
    if arguments != ["--stdin"]:
        print(__doc__)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    try:
        request = parse_request(sys.stdin.read())
        answer = bring_about(request, Reporter())
    except Problem as problem:
        print(json.dumps(problem.document()))
        return 2 if problem.id == "usage" else 1
    except OSError as error:
        print(json.dumps(of_the_system(error).document()))
        return 1
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
