"""Going back: a checkpoint from before the trouble, and the batches that are passed over on the way forward again.

What always holds: batches are known by the state of the data after them, which is the same whenever and on whatever
mesh or host they are drawn. Once a batch is on the list it is never trained on again, also after the run was killed and
resumed. So two returns never meet the same trouble, and every batch that is not on the list comes exactly as it would
have come.

Step 57 shows the trouble. Its loss belongs to the parameters after step 56, so the batches of 56 (whose update may be
to blame) and 57 are put on the list; the newest checkpoint of step 55 or before is good, because its parameters were
seen to give a good loss at the next step. From 40, say, the steps to 55 run again on the same batches, and 56 takes the
batch that comes after those of 57. When 40 is restored, the checkpoints after it are moved out of the way.
"""

import contextlib
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from train import distributed
from train.checkpoint import CheckpointError, CheckpointStore, Meta, checkpoint_steps
from train.errors import TryAgainError
from train.metrics import write_json
from train.reading import try_to_read
from train.state import TrainState
from train.unwritten import Unwritten

SKIPPED_FILE = "skipped_batches.json"


def batch_key(data_state: Any) -> str:
    """A short name of the batch after which the data iterator is in this state."""
    text = json.dumps(data_state, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class SkipList:
    """The batches of a run that are passed over."""

    def __init__(self, path: pathlib.Path, *, writes: bool = True, unwritten: Unwritten | None = None):
        """Read the list, if there is one; `writes` is False in a process that leaves the file to another.

        Raises:
          CheckpointError: the file is damaged.
        """
        self._path, self._writes, self._unwritten = path, writes, unwritten or Unwritten()
        try:
            self._entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        except ValueError as error:
            raise CheckpointError(
                f"{path} is damaged ({error}); put back a copy of it, or delete it: then the batches that it named are "
                "trained on again"
            ) from error
        self._keys = {entry["batch"] for entry in self._entries}

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, batches: Iterable[tuple[int, str]]) -> None:
        """Put (step, key) of batches on the list; on disk when this returns, where it can be written."""
        new = [{"step": step, "batch": key} for step, key in batches if key not in self._keys]
        self._entries += new
        self._keys.update(entry["batch"] for entry in new)
        if self._writes:
            with self._unwritten.attempt(SKIPPED_FILE):
                write_json(self._path, self._entries)

    def last_keys(self, data_state: Mapping[str, int], *, batch_size: int, num: int) -> list[str]:
        """Keys of the last `num` batches before a position in the data that were trained on, newest first."""
        keys: list[str] = []
        row = data_state["next_row"]
        while row > 0 and len(keys) < num:
            if (key := batch_key({"next_row": row})) not in self._keys:
                keys.append(key)
            row -= batch_size
        return keys

    def draw(self, data: Any) -> tuple[Any, str]:
        """The next batch that is not on the list, and its key."""
        while True:
            batch = next(data)
            key = batch_key(data.get_state())
            if key not in self._keys:
                return batch, key


def last_good_step(folder: pathlib.Path, first_bad_step: int) -> int | None:
    """Step of the newest checkpoint whose parameters gave a good loss before the trouble began; None: there is none."""
    good: list[int] = []
    with contextlib.suppress(OSError):  # the store is gone
        good = [step for step in checkpoint_steps(folder) if step <= first_bad_step - 2]
    return good[-1] if good else None


def restore_before(
    store: CheckpointStore, abstract: TrainState, first_bad_step: int
) -> tuple[TrainState, Meta, list[str]]:
    """The newest good checkpoint; then later ones are taken out of the way, because their steps run again.

    Raises:
      CheckpointError: none can be read, and all stay where they are; ask `last_good_step` first.
      TryAgainError: the store does not answer, or a later one cannot be moved.
    """
    newest = first_bad_step - 2
    restored = store.restore(abstract, up_to=newest)
    store.move_aside(_steps_after(store.folder, newest))
    return restored


def _steps_after(folder: pathlib.Path, step: int) -> list[int]:
    """The checkpoints of later steps, as process 0 sees them."""
    read = functools.partial(checkpoint_steps, folder)
    steps, _, problem = distributed.from_main(try_to_read(read) if distributed.is_main() else None)
    if steps is None:
        raise TryAgainError(
            f"the checkpoints in {folder} cannot be listed ({problem}); mend the store and start again with --resume"
        )
    return [later for later in steps if later > step]
