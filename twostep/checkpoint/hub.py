"""Downloads a model of the Hugging Face hub into the hub's own cache, where other programs find it, too. Torch-free.

Life of a `fetch`:

1. ask the hub which commit the revision is and which files it has; if it cannot be asked, the cache knows what the commit was last;
2. choose the files that are read here: configuration, tokenizer, chat templates, one set of safetensors;
3. see that the disk has room for what the cache lacks;
4. download it, several files at once. Each has a lock, so that of two processes one downloads and the other waits for it. What was cut
   goes on where it was, in this process or in a later one; only Xet's transfers begin a file anew;
5. write down which commit the branch is, for a start without a network.

    models--ORG--NAME/  refs/main: a commit    snapshots/COMMIT/config.json -> blobs/ETAG    blobs/ETAG.incomplete
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

from huggingface_hub import HfApi, constants, get_hf_file_metadata, get_token, hf_hub_download, hf_hub_url, is_offline_mode
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get, is_xet_available
from huggingface_hub.utils import WeakFileLock, build_hf_headers, tqdm

from twostep.checkpoint.directory import INDEX, SINGLE, read_weight_map, weight_files
from twostep.errors import SetupError
from twostep.process.startup import Progress

_NEEDED = ("config.json", "tokenizer.json")
_READ = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|chat_template)\.json"
    r"|chat_template\.jinja|additional_chat_templates/[\w.-]+\.jinja|modules\.json|1_Pooling/config\.json"
    r"|sentence_bert_config\.json"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"(?!.*\.\.)\w[\w./+-]{0,254}", re.ASCII)
# The etag of a large file, which is not in git itself.
_SHA256 = re.compile(r"[0-9a-f]{64}")
# In the address of a mirror.
_PASSWORD = re.compile(r"//[^/@]*@")
_FILES_AT_ONCE = 4
# What other writers of the disk may take meanwhile.
_SPARE_BYTES = 64 << 20
_SHOWN_CHARS = 200
_SILENT_WAIT_S = 1.0
# So much of a file arrives before anything is heard of it. The package's own 10 MB would keep Ctrl-C waiting on a slow network.
constants.DOWNLOAD_CHUNK_SIZE = 1 << 20
# What asking the hub, and writing to the cache, may raise.
_FAILURES = (HTTPError, OSError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """Says where the hub is and what is ours of it. None: as huggingface_hub finds it, in HF_ENDPOINT, HF_HUB_CACHE or HF_HOME, HF_TOKEN or
    the file that `hf auth login` writes, and HF_HUB_OFFLINE, which it reads when it is imported."""

    endpoint: str | None = None
    cache_dir: Path | None = None
    token: str | None = field(default=None, repr=False)
    offline: bool | None = None
    # For the hub to answer; None: HF_HUB_ETAG_TIMEOUT, or else ten seconds.
    timeout_s: float | None = None


def fetch(repository: str, revision: str, *, weights: bool, progress: Progress, hub: Hub | None = None) -> Path:
    """As directory_of (model_name.py)."""
    if not _REVISION.fullmatch(revision):
        raise SetupError(f"--model-revision {revision!r} is none: give a branch, a tag or a commit")
    # Its warnings quote addresses, and those of a store behind the hub are permissions.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    return _Model(repository, revision, weights, hub or Hub(), progress).fetch()


class _Model:
    """One revision of a repository, on the hub and in the cache."""

    def __init__(self, repository: str, revision: str, weights: bool, hub: Hub, progress: Progress) -> None:
        self._name, self._revision, self._weights, self._progress = repository, revision, weights, progress
        self._offline = is_offline_mode() if hub.offline is None else hub.offline
        self._endpoint = (hub.endpoint or constants.ENDPOINT).rstrip("/")
        self._token = hub.token or get_token()
        self._timeout_s = hub.timeout_s or constants.HF_HUB_ETAG_TIMEOUT
        self._cache = hub.cache_dir or Path(constants.HF_HUB_CACHE).expanduser()
        self._folder = self._cache / f"models--{repository.replace('/', '--')}"
        self._commit = revision if _COMMIT.fullmatch(revision) else ""
        # Of all files there are, by name: bytes and etag.
        self._files: dict[str, tuple[int, str]] = {}
        # Bytes that have arrived, and those that were not in the cache.
        self._done = self._total = 0
        self._counting = threading.Lock()
        self._stopped = False

    @property
    def _snapshot(self) -> Path:
        return self._folder / "snapshots" / self._commit

    def fetch(self) -> Path:
        if self._offline:
            return self._cached("HF_HUB_OFFLINE forbids to ask the hub")
        try:
            self._ask()
        except RevisionNotFoundError as error:
            raise SetupError(self._refusal(error)) from None
        except (*_FAILURES, LookupError, TypeError) as error:
            # The last two come of answers that are none of a hub.
            return self._cached(self._refusal(error))
        self._progress.say(f"{self._name}: {self._revision} is commit {self._commit}")
        try:
            # What is small first: where there are weights, there is everything.
            self._download(name for name in self._files if _READ.fullmatch(name) or (name == INDEX and self._weights))
            self._download(self._weight_names())
        except KeyboardInterrupt:
            self._progress.say(f"interrupted; {self._kept()}")
            raise
        except _FAILURES as error:
            raise SetupError(f"{self._refusal(error)}; {self._kept()}" if self._done else self._refusal(error)) from None
        if lacking := self._lacks():
            raise SetupError(f"{self._name} cannot be served: {lacking}")
        self._remember()
        return self._snapshot

    def _ask(self) -> None:
        api = HfApi(endpoint=self._endpoint, token=self._token)
        found = api.model_info(self._name, revision=self._revision, timeout=self._timeout_s, files_metadata=True)
        if not _COMMIT.fullmatch(found.sha or ""):
            raise ValueError(f"{found.sha!r} is no commit")
        self._commit = found.sha
        self._files = {each.rfilename: (each.size or 0, each.lfs.sha256 if each.lfs else each.blob_id or "") for each in found.siblings}
        for name in _NEEDED:
            if name not in self._files:
                raise SetupError(f"{self._name} has no {name}, and so is no model that is served here: docs/models.md says which are")

    def _weight_names(self) -> set[str]:
        if not self._weights:
            return set()
        if SINGLE in self._files:
            return {SINGLE}
        if INDEX not in self._files:
            raise SetupError(f"{self._name} has no safetensors, the only weights that are read here: take another repository of the model")
        names = set(read_weight_map(self._snapshot / INDEX).values())
        if missing := sorted(names - self._files.keys()):
            raise SetupError(f"{self._name} lacks {missing[0]}, which its {INDEX} names: take another --model-revision")
        return names

    # ---- the cache ----

    def _cached(self, reason: str) -> Path:
        """Returns what is in the cache. `reason`: why the hub does not say what there is."""
        if not self._commit:
            try:
                self._commit = (self._folder / "refs" / self._revision).read_text(encoding="ascii").strip()
            except OSError:
                raise SetupError(f"{reason}. {self._name} ({self._revision}) is not in {self._cache}, either") from None
        if lacking := self._lacks():
            raise SetupError(f"{reason}. {self._name} is not all in {self._cache}, either: {lacking}")
        self._progress.say(f"{self._name}: {self._revision} is commit {self._commit} in {self._cache}. {reason}")
        return self._snapshot

    def _lacks(self) -> str:
        """Returns what the snapshot lacks to be served; empty: nothing."""
        for name in _NEEDED:
            if not (self._snapshot / name).is_file():
                return f"{self._snapshot} has no {name}"
        try:
            if self._weights:
                weight_files(self._snapshot)
        except SetupError as error:
            return error.message
        return ""

    def _remember(self) -> None:
        """Writes down which commit the branch or tag is."""
        ref = self._folder / "refs" / self._revision
        if self._revision == self._commit:
            return
        try:
            if ref.is_file() and ref.read_text() == self._commit:
                return
            ref.parent.mkdir(parents=True, exist_ok=True)
            new = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
            new.write_text(self._commit)
            new.replace(ref)
        except OSError as error:
            self._progress.say(f"{ref} cannot be written ({error.strerror}): without a network {self._revision} will not be found")

    # ---- downloading ----

    def _download(self, names: Iterable[str]) -> None:
        names = [name for name in names if not (self._snapshot / name).is_file()]
        if not names:
            return
        blobs = self._folder / "blobs"
        asked = sum(size for size, etag in map(self._files.__getitem__, names) if not (etag and (blobs / etag).exists()))
        self._total += asked
        blobs.mkdir(parents=True, exist_ok=True)
        _check_space(blobs, asked)
        if any(name.endswith(".safetensors") for name in names):
            self._progress.say(f"downloading {_size(asked)} to {self._cache}")
        self._progress.phase("download")
        waiting, ended = SimpleQueue[str](), SimpleQueue[BaseException | None]()
        for name in names:
            waiting.put(name)
        for _ in range(min(_FILES_AT_ONCE, len(names))):
            # Nobody waits for one that hangs: neither Ctrl-C nor the end of the process.
            threading.Thread(target=self._work, args=(waiting, ended), name="download", daemon=True).start()
        try:
            for _ in names:
                if (error := ended.get()) is not None:
                    raise error
        except BaseException:
            # Those that still run end at their next bytes.
            self._stopped = True
            raise

    def _work(self, waiting: SimpleQueue[str], ended: SimpleQueue[BaseException | None]) -> None:
        with contextlib.suppress(Empty):
            while not self._stopped:
                name = waiting.get_nowait()
                try:
                    self._get(name)
                except BaseException as error:  # noqa: BLE001 - raised where the files are waited for
                    ended.put(error)
                else:
                    ended.put(None)

    def _get(self, name: str) -> None:
        if _SHA256.fullmatch(self._files[name][1]):
            self._go_on(hf_hub_url(self._name, name, revision=self._commit, endpoint=self._endpoint))
        # Links what is there into the snapshot, and gets all else.
        hf_hub_download(
            self._name,
            name,
            revision=self._commit,
            cache_dir=self._cache,
            endpoint=self._endpoint,
            token=self._token,
            etag_timeout=self._timeout_s,
            tqdm_class=self._bar(),
        )

    def _go_on(self, url: str) -> None:
        """Downloads what is missing of a large file, which huggingface_hub itself would begin anew in each process; but leaves it to that
        where it comes by Xet."""
        about = get_hf_file_metadata(url, token=self._token, endpoint=self._endpoint, timeout=self._timeout_s)
        etag, size = about.etag or "", about.size
        if not _SHA256.fullmatch(etag) or size is None or (about.xet_file_data is not None and is_xet_available()):
            return
        blob, partial = self._folder / "blobs" / etag, self._folder / "blobs" / f"{etag}.incomplete"
        lock = self._cache / ".locks" / self._folder.name / f"{etag}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        # The one that huggingface_hub takes, wherever it runs.
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(WeakFileLock(lock, timeout=_SILENT_WAIT_S))
            except TimeoutError:
                self._progress.say(f"another process downloads a file of {self._name}: waiting for it")
                held.enter_context(WeakFileLock(lock))
            if blob.exists():
                self._count(size)
                return
            partial.touch()
            # Where locks do not hold, two processes write the same bytes to the same places, which does no harm; appended they would.
            with partial.open("r+b") as file:
                if partial.stat().st_size > size:
                    file.truncate(0)
                begun = file.seek(0, os.SEEK_END)
                self._count(begun)
                # The hub's own address: where it leads elsewhere, the token is left out.
                headers = build_hf_headers(token=self._token)
                http_get(url, file, resume_size=begun, headers=headers, expected_size=size, tqdm_class=self._bar())
            if begun and _sha256(partial) != etag:
                partial.unlink()
                raise SetupError(f"a file of {self._name} has come in parts that do not fit together; they are deleted: start again")
            # Where locks do not hold, another may have done so.
            with contextlib.suppress(FileNotFoundError):
                partial.rename(blob)

    def _bar(self) -> type[tqdm]:
        """Makes what huggingface_hub takes for a progress bar."""
        count = self._count

        class Counted(tqdm):  # type: ignore[misc]
            def __init__(self, *args: object, **options: object) -> None:
                super().__init__(disable=True)

            def update(self, n: float | None = 1) -> None:
                count(int(n or 0))

            def update_transfer(self, n: float | None = 1) -> None:
                """Hears of Xet's bytes on the network; those that are written count."""

            def set_transfer_postfix_str(self, *args: object, **options: object) -> None:
                """Belongs to them."""

        return Counted

    def _count(self, num_bytes: int) -> None:
        if self._stopped:
            raise OSError("another file could not be downloaded")
        with self._counting:
            self._done += num_bytes
            self._progress.advance(min(self._done, self._total), self._total, "B")

    # ---- what to say ----

    def _kept(self) -> str:
        return f"{_size(self._done)} of {_size(self._total)} have arrived and stay in {self._cache}: start again to go on from there"

    def _refusal(self, error: Exception) -> str:
        """Returns why the hub or the disk refuses, and what to do."""
        hub = _PASSWORD.sub("//", self._endpoint)
        model = f"{hub}/{self._name}"
        if isinstance(error, GatedRepoError):
            has = "has no access to it" if self._token else "is needed"
            return f"{self._name} is gated, and a token {has}: accept its licence at {model}, then give a token of that account in HF_TOKEN"
        if isinstance(error, RevisionNotFoundError):
            return f"{self._name} has no revision {self._revision}: give --model-revision a branch, a tag or a commit of {model}"
        if isinstance(error, RepositoryNotFoundError):
            return (
                f"there is no directory {self._name} here and no model {model}, or it is private: check the name, or give a token that may "
                "read it in HF_TOKEN"
            )
        if isinstance(error, HfHubHTTPError):
            status = error.response.status_code
            todo = "check HF_TOKEN, or unset it" if status in (401, 403) else "try again later"
            return f"{hub} answers with status {status}: {todo}"
        if isinstance(error, HTTPError | ConnectionError | LocalEntryNotFoundError):
            return f"{hub} cannot be reached ({_short(error)}): check the network, HTTPS_PROXY and HF_ENDPOINT"
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return f"{self._cache} is too small ({error.strerror}): free some disk space, or set HF_HOME to another place"
        if isinstance(error, OSError) and error.errno is not None:
            return f"the cache {self._cache} cannot be used ({_short(error)}): make it writable, or set HF_HOME to another place"
        return f"{hub} answers what a hub does not ({_short(error)}): check HF_ENDPOINT, or try again"


def _check_space(directory: Path, asked: int) -> None:
    """Raises OSError where so many bytes, less those of files that were cut, are more than is free."""
    begun = sum(path.stat().st_size for path in directory.glob("*.incomplete"))
    free, asked = shutil.disk_usage(directory).free, asked - begun
    if asked + _SPARE_BYTES > free and asked > 0:
        raise OSError(errno.ENOSPC, f"{_size(asked)} are to come, {_size(free)} are free")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _short(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0][:_SHOWN_CHARS]
