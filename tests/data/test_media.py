# .venv/bin/python -m pytest tests/data/test_media.py
"""Pictures open as they do in Hugging Face, and broken or forbidden ones are refused by name."""

import base64
import contextlib
import gzip
import http.server
import io
import os
import socket
import threading
import zlib

import numpy as np
import PIL.Image
import pytest
from PIL import EpsImagePlugin
from transformers.image_utils import load_image

from megatron_vlm.data.media import fetch as fetching
from megatron_vlm.data.media.fetch import fetch, is_public
from megatron_vlm.data.media.media import FORMATS, MediaPolicy, image_size, read_image
from megatron_vlm.data.records.record import Image
from megatron_vlm.errors import DataError
from tests.support.error_fields import raises


def noise(width=40, height=24, channels=3):
    values = np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return PIL.Image.fromarray(values.squeeze())


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def read(source, policy):
    return read_image(Image(source), policy, "x:1")


MODES = ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "YCbCr", "HSV", "I", "F", "I;16", "LAB"]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_becomes_rgb_as_in_hugging_face(mode, tmp_path):
    if mode == "I;16":
        image = PIL.Image.fromarray(np.arange(960, dtype=np.uint16).reshape(24, 40) * 60)
    else:
        image = noise().convert("L").convert(mode) if mode in ("I", "F") else noise().convert(mode)
    assert image.mode == mode
    actual = read(image, MediaPolicy(str(tmp_path)))
    assert actual.mode == "RGB"
    assert actual.tobytes() == load_image(image).tobytes()


def test_transparent_palette_as_in_hugging_face(tmp_path):
    path = tmp_path / "p.png"
    path.write_bytes(encoded(noise().convert("P"), transparency=3))
    assert read("p.png", MediaPolicy(str(tmp_path))).tobytes() == load_image(str(path)).tobytes()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_has_a_switch(orientation, tmp_path):
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "turned.jpg"
    path.write_bytes(encoded(noise(), "JPEG", exif=exif))
    on, off = MediaPolicy(str(tmp_path)), MediaPolicy(str(tmp_path), exif_orientation=False)
    turned = read("turned.jpg", on)
    assert turned.tobytes() == load_image(str(path)).tobytes()
    assert image_size(Image("turned.jpg"), on, "") == turned.size[::-1]
    assert turned.size == ((40, 24) if orientation < 5 else (24, 40))
    assert read("turned.jpg", off).tobytes() == PIL.Image.open(path).convert("RGB").tobytes()
    assert image_size(Image("turned.jpg"), off, "") == (24, 40)


def test_a_png_is_measured_without_being_decoded(tmp_path):
    """The file has only its first bytes. With EXIF in front, its orientation counts."""
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    policy = MediaPolicy(str(tmp_path))
    for options, size in (({}, (400, 300)), ({"exif": exif}, (300, 400))):
        file = encoded(noise(300, 400), **options)[:500]
        assert image_size(Image(file), policy, "x:1") == size


def test_all_ways_to_give_a_picture(tmp_path):
    file = encoded(noise())
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a b.png").write_bytes(file)
    policy = MediaPolicy(str(tmp_path))
    uri = "data:image/png;base64," + base64.b64encode(file).decode()
    absolute = tmp_path / "in" / "a b.png"
    for source in ("in/a b.png", str(absolute), absolute.as_uri(), uri, file, noise()):
        assert read(source, policy).tobytes() == noise().tobytes()


def bomb():
    """Return a PNG whose header claims 20,000 x 20,000 pixels."""
    data = bytearray(encoded(noise()))
    data[16:24] = (20000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


LARGE = encoded(noise(200, 200))
BROKEN = {
    "empty file": (b"", "is not an image that can be opened"),
    "a text": (b"not a picture", "is not an image that can be opened"),
    "html in place of a picture": (b"<html>404</html>", "is not an image that can be opened"),
    "only a header": (encoded(noise())[:30], "is not an image that can be opened"),
    "bomb": (bomb(), "has more than"),
    "aspect": (encoded(noise(2010, 10)), "is 2010 x 10 pixels, and sides may differ by a factor"),
    "0 x 0": (PIL.Image.new("RGB", (0, 0)), "is 0 x 0 pixels"),
    "truncated JPEG": (
        encoded(noise(200, 200), "JPEG")[:9000],
        "cannot be decoded: image file is truncated",
    ),
    "truncated PNG": (LARGE[:5000], "cannot be decoded"),
    "damaged PNG": (LARGE[:3000] + b"\0" * 500 + LARGE[3500:], "cannot be decoded"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("form", ["bytes", "file"])
def test_broken_pictures_are_refused_by_name(name, form, tmp_path):
    data, words = BROKEN[name]
    if isinstance(data, bytes):
        (tmp_path / "bad.png").write_bytes(data)
    source = "bad.png" if form == "file" and isinstance(data, bytes) else data
    if not data and form == "bytes":
        pytest.skip("formats.py refuses empty bytes: see test_formats.py")
    with pytest.raises(DataError) as error:
        read(source, MediaPolicy(str(tmp_path)))
    assert str(error.value).startswith("x:1")
    assert words in str(error.value)


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 24\n%%EndComments\nshowpage\n"


@pytest.mark.parametrize("form", ["bytes", "file", "data URI"])
def test_no_picture_starts_a_program(form, tmp_path, monkeypatch):
    """Pillow itself hands PostScript to Ghostscript, under any file name."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # Pillow remembers its last search
    (tmp_path / "photo.png").write_bytes(POSTSCRIPT)
    with contextlib.suppress(OSError), PIL.Image.open(tmp_path / "photo.png") as opened:
        opened.load()
    assert (tmp_path / "ran").exists()
    (tmp_path / "ran").unlink()
    uri = "data:image/png;base64," + base64.b64encode(POSTSCRIPT).decode()
    source = {"bytes": POSTSCRIPT, "file": "photo.png", "data URI": uri}[form]
    for opening in (image_size, read_image):
        with pytest.raises(DataError, match="it is none of JPEG, PNG, WEBP, GIF, BMP, TIFF, AVIF"):
            opening(Image(source), MediaPolicy(str(tmp_path)), "x:1")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", [*FORMATS, "MPO"])
def test_the_formats_that_open(kind):
    file = encoded(noise(), kind, **({"save_all": True} if kind == "MPO" else {}))
    policy = MediaPolicy(None)
    assert read(file, policy).size == (40, 24)
    assert image_size(Image(file), policy, "x:1") == (24, 40)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.filterwarnings("ignore")  # Pillow warns of TIFF and EXIF
def test_a_damaged_picture_opens_or_is_refused(kind):
    """Each of Pillow's decoders raises errors of its own; that of AVIF raises RuntimeError."""
    whole, refused = encoded(noise(), kind), 0
    for place in range(0, len(whole), max(1, len(whole) // 150)):
        damaged = whole[:place] + bytes([whole[place] ^ 0x7F]) + whole[place + 1 :]
        try:
            assert read(damaged, MediaPolicy(None)).mode == "RGB"
        except DataError as error:
            assert str(error).startswith("x:1: an image given as bytes")
            refused += 1
    assert refused


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("missing.png", "no file missing.png in data.image_root="),
        ("folder", "no file folder in data.image_root="),
        ("folder", "it is a folder"),
        ("pipe.png", "it is a named pipe"),
        ("zero.png", "lies outside data.image_root"),
        ("../secret.png", "lies outside data.image_root"),
        ("folder/../../secret.png", "lies outside data.image_root"),
        ("/etc/passwd", "lies outside data.image_root"),
        ("file:///etc/passwd", "lies outside data.image_root"),
        ("link.png", "lies outside data.image_root"),
        ("a\0b.png", "is not a path"),
        ("x" * 5000, "is not a path"),
        ("data:image/png,AAAA", "a data URI must be base64"),
        ("data:image/png;base64,A*A", "the data URI is not base64"),
        ("data:image/png;base64,AAAA", "is not an image that can be opened"),
        ("http://example.org/a.png", "is on the network; download it, or set data.allow_http=true"),
    ],
)
def test_forbidden_and_missing_sources(source, words, tmp_path):
    root = tmp_path / "root"
    (root / "folder").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(encoded(noise()))
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "zero.png").symlink_to("/dev/zero")
    os.mkfifo(root / "pipe.png")
    with pytest.raises(DataError) as error:
        read(source, MediaPolicy(str(root)))
    assert words in str(error.value)


def test_a_path_from_the_working_directory_is_told_to_be_one(tmp_path, monkeypatch):
    """Other trainers read paths from there. Nothing is said of files outside of it."""
    (tmp_path / "root").mkdir()
    (tmp_path / "here" / "images").mkdir(parents=True)
    for path in ("here/images/a.png", "b.png"):
        (tmp_path / path).write_bytes(encoded(noise()))
    (tmp_path / "here" / "link.png").symlink_to(tmp_path / "b.png")
    monkeypatch.chdir(tmp_path / "here")
    for name, remedy in (
        ("images/a.png", "set data.image_root=."),
        ("images\\a.png", "separate folders by /, as in images/a.png"),
        *(
            (name, "set data.image_root to the folder at which its paths begin")
            for name in ("images", "images/c.png", "link.png")
        ),
        ("y" * 300, ""),
    ):
        with raises(DataError, place="x:1", remedy=remedy):
            read(name, MediaPolicy(str(tmp_path / "root")))


HOSTS = ("127.0.0.1", "localhost", "10.0.0.1", "169.254.169.254", "[::1]", "[::ffff:10.0.0.1]")


@pytest.mark.parametrize("host", [*HOSTS, "0.0.0.0", "2130706433", "user@127.0.0.1"])
def test_private_addresses_are_never_asked(host, tmp_path):
    with pytest.raises(DataError, match="is not a public address"):
        read(f"http://{host}/a.png", MediaPolicy(str(tmp_path), allow_http=True))


PUBLIC = [
    "93.184.216.34",
    *("2606:4700::1111", "::ffff:93.184.216.34"),
    "64:ff9b::5db8:d822",  # an IPv4 address by way of DNS64
    "2002:5db8:d822::1",  # 6to4
]
PRIVATE = [
    "100.64.0.1",
    "224.0.0.1",  # multicast
    "240.0.0.1",  # reserved
    *("255.255.255.255", "::", "::1", "::127.0.0.1", "::10.0.0.1"),
    *("::ffff:169.254.169.254", "::ffff:224.0.0.1"),
    "::ffff:0:127.0.0.1",  # IPv4-translated
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::7f00:1",  # a local NAT64
    *("2002:7f00:1::", "2002:a00:1::1"),
    "2001:0:5db8:d822:0:0:f5ff:fffe",  # Teredo: a public server, and 10.0.0.1 inverted
    "2606:4700::5efe:7f00:1",  # ISATAP
    "2606:4700::200:5efe:a00:1",
    "fec0::1",  # site-local
    *("fc00::1", "fe80::1%1", "ff02::1", "2001:db8::1"),
    "ff0e::1",  # multicast of global scope
    "4000::1",  # not assigned
]


def test_public_addresses():
    assert [address for address in PUBLIC if not is_public(address)] == []
    assert [address for address in PRIVATE if is_public(address)] == []


class _Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if body := {"/a.png": encoded(noise()), "/large": b"x" * 300_000}.get(self.path):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)
        elif self.path.startswith("/packed"):
            self.send_response(200)
            self.send_header("Content-Encoding", self.path.split("/")[2].replace("+", ", "))
            self.end_headers()
            self.wfile.write(gzip.compress(gzip.compress(bytes(2**20))))
        elif self.path == "/missing":
            self.send_error(404)
        elif self.path in ("/304", "/302", "/300"):
            self.send_response(int(self.path[1:]))
            self.end_headers()
        else:
            self.send_response(302)
            target = {
                "/once": "/a.png",
                "/inside": "http://127.0.0.2/a.png",
                "/file": "file:///etc/passwd",
            }
            self.send_header("Location", target.get(self.path, "/again"))
            self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://localhost:{running.server_port}"
        running.shutdown()
        thread.join()


def only_here(address):
    return address in ("127.0.0.1", "::1")


def test_fetch_from_an_allowed_address(server):
    for path in ("/a.png", "/once"):
        assert fetch(server + path, "x:1", only_here) == encoded(noise())


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/missing", "the server answers 404"),
        ("/304", "the server answers 304"),
        ("/302", "the server answers 302"),
        ("/300", "the server answers 300"),
        ("/inside", "127.0.0.2, which is not a public address"),
        ("/file", "'file:///etc/passwd', which is not http"),
        ("/again", "more than 3 redirects"),
    ],
)
def test_fetch_refuses(path, words, server):
    with pytest.raises(DataError) as error:
        fetch(server + path, "x:1", only_here)
    assert words in str(error.value)


def test_fetch_stops_at_the_limit(server, monkeypatch):
    monkeypatch.setattr(fetching, "MAX_BYTES", 2**16)
    with raises(DataError, place="x:1", problem_has="larger than"):
        fetch(server + "/large", "x:1", only_here)


@pytest.mark.parametrize("encoding", ["gzip", "gzip+gzip", "br", "DEFLATE"])
def test_packed_content_is_refused(encoding, server):
    with raises(DataError, place="x:1", problem_has="(Content-Encoding: "):
        fetch(f"{server}/packed/{encoding}", "x:1", only_here)


@pytest.fixture(params=["headers", "body", "TLS handshake", "nothing"])
def dripping(request):
    """Yield the address of a server that sends a byte every 50 ms, without end."""
    stopped = threading.Event()

    def drip(connection):
        with connection, contextlib.suppress(OSError):
            if request.param == "body":
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            elif request.param == "TLS handshake":
                connection.sendall(b"\x16\x03\x03\x40\x00")  # a record of 16 KiB
            while not stopped.wait(0.05):
                connection.sendall(b"" if request.param == "nothing" else b"H")

    def serve():
        with contextlib.suppress(OSError):
            while True:
                drips.append(threading.Thread(target=drip, args=(listening.accept()[0],)))
                drips[-1].start()

    drips = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = threading.Thread(target=serve)
        server.start()
        scheme = "https" if request.param == "TLS handshake" else "http"
        yield f"{scheme}://localhost:{listening.getsockname()[1]}/a.png"
        stopped.set()
        listening.shutdown(socket.SHUT_RDWR)
    for thread in (server, *drips):
        thread.join()


def test_a_server_that_drips_holds_nobody(dripping, monkeypatch):
    monkeypatch.setattr(fetching, "TOTAL_S", 0.5)
    monkeypatch.setattr(fetching, "TIMEOUT_S", 2.0)
    with raises(DataError, place="x:1", problem_has="0.5 s", remedy_has="data.image_root"):
        fetch(dripping, "x:1", only_here)


def test_nobody_answers():
    with raises(DataError, place="x:1", problem_has="cannot be fetched"):
        fetch("http://127.0.0.1:9/a.png", "x:1", only_here)
