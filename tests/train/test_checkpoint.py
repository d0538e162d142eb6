import contextlib
import logging
import os
import signal
import threading
import time
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.errors import UserError
from oelm.train.checkpoint import BEST, LAST, PREVIOUS, DamagedError, Writer, read, read_last, write


def content(step, size=100):
    return {"step": step, "model": {"w": torch.full((size,), float(step))}}


def test_what_is_read_is_what_was_written_and_torch_reads_it_too(tmp_path):
    path = tmp_path / LAST
    size = write(content(3), path)
    assert size == path.stat().st_size
    assert read(path)["model"]["w"].equal(torch.full((100,), 3.0))
    assert torch.load(path, weights_only=True)["step"] == 3
    assert zipfile.ZipFile(path).comment.startswith(b"sha256:")
    assert [p.name for p in tmp_path.iterdir()] == [LAST]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_cut_and_any_altered_byte_is_found(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damage")
    write(content(1, size=8), folder / LAST)
    whole = (folder / LAST).read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        damaged = whole[:place]
    else:
        change = data.draw(st.integers(1, 255))
        damaged = whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :]
    (folder / LAST).write_bytes(damaged)
    with pytest.raises(DamagedError, match=r"last\.pt is cut or altered"):
        read(folder / LAST)


def test_a_damaged_checkpoint_gives_way_to_the_one_before_with_a_warning(tmp_path, caplog):
    assert read_last(tmp_path) is None
    for step in (1, 2):
        write(content(step), tmp_path / LAST, previous=tmp_path / PREVIOUS)
    assert read_last(tmp_path)["step"] == 2
    os.truncate(tmp_path / LAST, 500)
    with caplog.at_level(logging.WARNING):
        assert read_last(tmp_path)["step"] == 1
    assert "last.pt is cut or altered" in caplog.text
    (tmp_path / PREVIOUS).write_bytes(b"")
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole; restore one, or remove"):
        read_last(tmp_path)


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)

    write({"step": 1, "model": Evil()}, tmp_path / LAST)
    with pytest.raises(Exception, match="Weights only load failed"):
        read(tmp_path / LAST)
    assert not (tmp_path / "pwned").exists()


def test_the_writer_keeps_order_and_the_newest(tmp_path):
    with Writer(tmp_path, keep=2) as writer:
        for step in range(1, 7):
            writer.submit(BEST, content(step))
            writer.submit(LAST, content(step))
            writer.flush()
    assert read(tmp_path / LAST)["step"] == 6
    assert read(tmp_path / PREVIOUS)["step"] == 5
    assert read(tmp_path / BEST)["step"] == 6
    kept = sorted(p.name for p in tmp_path.glob("step-*.pt"))
    assert kept == [f"step-{n:08d}.pt" for n in (3, 4, 5, 6)]


def test_a_full_disk_leaves_the_old_checkpoint_and_is_retried(small_disk, caplog):
    folder, clear, fill = small_disk
    with Writer(folder, retry_seconds=0.05) as writer, caplog.at_level(logging.WARNING):
        writer.submit(LAST, content(1, size=60_000))
        writer.flush()
        fill()
        writer.submit(LAST, content(2, size=60_000))
        with pytest.raises(OSError, match="cannot save in"):
            writer.flush(patience=0.4)
        assert read_last(folder)["step"] == 1
        assert not list(folder.glob("*.tmp"))
        writer.submit(LAST, content(3, size=60_000))  # training went on meanwhile
        clear()
        writer.flush()
    assert read_last(folder)["step"] == 3
    assert "training goes on" in caplog.text
    assert "saved last.pt after all" in caplog.text


def test_training_waits_for_the_copy_only(tmp_path):
    """`submit` returns while an earlier write is still stuck."""
    stuck = threading.Event()

    class Slow(Writer):
        def _try(self, name, content):
            stuck.wait(10)
            return super()._try(name, content)

    with Slow(tmp_path) as writer:
        for step in range(1, 4):
            writer.submit(LAST, content(step))
        stuck.set()
        writer.flush()
    assert read(tmp_path / LAST)["step"] == 3


def test_a_process_killed_inside_a_save_leaves_a_whole_checkpoint(tmp_path):
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            for step in range(1, 10_000):
                write(content(step, size=300_000), tmp_path / LAST, previous=tmp_path / PREVIOUS)
        os._exit(0)
    try:
        until = time.monotonic() + 20
        while not (tmp_path / PREVIOUS).exists() and time.monotonic() < until:
            time.sleep(0.001)
        while not (tmp_path / f"{LAST}.tmp").exists() and time.monotonic() < until:
            pass
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    found = read_last(tmp_path)
    assert found["model"]["w"].equal(torch.full((300_000,), float(found["step"])))
    with Writer(tmp_path):
        assert not list(tmp_path.glob("*.tmp"))
