"""SQLite on a network volume is named as such."""

import logging

import pytest

from runtara.persistence.sqlite import volume

MOUNTS = """\
/dev/sda1 / ext4 rw,relatime 0 0
server:/export /srv/data nfs4 rw 0 0
host /srv/data/local\\040disk ext4 rw 0 0
share /mnt/share fuse.sshfs rw 0 0
broken
"""


@pytest.mark.parametrize(
    ("path", "kind", "unsuitable"),
    [
        ("/home/app.db", "ext4", False),
        ("/srv/data/app.db", "nfs4", True),
        ("/srv/database/app.db", "ext4", False),
        ("/srv/data/local disk/app.db", "ext4", False),
        ("/mnt/share/app.db", "fuse.sshfs", True),
    ],
)
def test_the_longest_mount_point_tells_the_kind(path: str, kind: str, unsuitable: bool) -> None:
    assert volume.kind_of_volume(path, MOUNTS) == kind
    assert volume.is_unsuitable(kind) is unsuitable


def test_a_network_volume_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(volume, "kind_of_volume", lambda path, mounts: "nfs")
    with caplog.at_level(logging.WARNING, "runtara.persistence"):
        volume.warn_of_unsuitable_volume("/srv/app.db")
    assert [record.getMessage() for record in caplog.records] == [
        "/srv/app.db lies on a nfs volume, where SQLite's locks may not work and the file may be damaged; "
        "use a local disk (in a container: a named volume)"
    ]


def test_a_local_volume_is_not_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(volume, "kind_of_volume", lambda path, mounts: "ext4")
    volume.warn_of_unsuitable_volume("/srv/app.db")
    assert caplog.records == []


def test_without_a_mount_table_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(volume, "MOUNTS", "/nowhere/mounts")
    volume.warn_of_unsuitable_volume("/srv/app.db")
    assert caplog.records == []
