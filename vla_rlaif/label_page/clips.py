"""Clips as the page gets them: one picture per clip and camera that holds every frame, kept compressed."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from vla_rlaif.label_page.catalogue import Catalogue, Shown
from vla_rlaif.local_page.sheets import encode_sheet


class ClipCache:
    """Sheets by episode and camera. The least recently used ones go when ``max_bytes`` are held.

    May be used from any thread; one at a time reads frames.
    """

    def __init__(self, catalogue: Catalogue, *, max_bytes: int = 256 * 2**20) -> None:
        self._catalogue, self._max_bytes = catalogue, max_bytes
        self._sheets: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._num_bytes = 0
        self._reading, self._keeping = threading.Lock(), threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Held now."""
        return self._num_bytes

    def shown(self, name: str) -> Shown | None:
        return self._catalogue.shown(name)

    def sheet(self, name: str, camera: str, *, also: Sequence[str] = ()) -> bytes:
        """One sheet. ``also`` names episodes that will be wanted soon: those in the same file cost little more."""
        if (found := self._kept(name, camera)) is not None:
            return found
        with self._reading:
            if (found := self._kept(name, camera)) is not None:  # another thread was faster
                return found
            missing = [other for other in dict.fromkeys((name, *also)) if self._kept(other, camera) is None]
            sheets = _sheets(self._catalogue, missing)
            for key, data in sheets.items():
                if key[0] != name:
                    self._keep(key, data)
            for key, data in sheets.items():  # last, so that what is asked for is not what goes first
                if key[0] == name:
                    self._keep(key, data)
            return sheets[name, camera]

    def _kept(self, name: str, camera: str) -> bytes | None:
        with self._keeping:
            if (name, camera) not in self._sheets:
                return None
            self._sheets.move_to_end((name, camera))
            return self._sheets[name, camera]

    def _keep(self, key: tuple[str, str], data: bytes) -> None:
        with self._keeping:
            self._num_bytes += len(data) - len(self._sheets.pop(key, b""))
            self._sheets[key] = data
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= len(self._sheets.popitem(last=False)[1])


def _sheets(catalogue: Catalogue, names: Sequence[str]) -> Mapping[tuple[str, str], bytes]:
    frames = catalogue.frames(names)
    return {
        (name, camera): encode_sheet(images)
        for name, by_camera in frames.items()
        for camera, images in by_camera.items()
    }
