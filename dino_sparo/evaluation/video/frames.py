"""A video file or a folder -> frames, and pictures -> a video file (mp4 and avi by PyAV, gif by Pillow)."""

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image, ImageSequence

from dino_sparo.data.sources.decode import IMAGE_EXTENSIONS
from dino_sparo.draw.pixels import Picture
from dino_sparo.runtime.faults import UserError, require
from dino_sparo.runtime.files import open_regular, written_beside
from dino_sparo.runtime.lock import create_output_dir

DEFAULT_FPS = 30.0
JPEG_QUALITY = 95
CODECS = {"mp4": "libx264", "avi": "mpeg4"}  # H.264 plays in browsers
ANIMATIONS = (".gif", ".webp", ".apng", ".png")  # formats of videos that Pillow reads


def list_pictures(folder: Path) -> list[Path]:
    """The images of a folder, all of one size, in the order of the numbers in their names.

    Raises:
        UserError: there are none, one is unreadable, or their sizes differ.
    """
    images = [path for path in folder.iterdir() if path.suffix.lower() in IMAGE_EXTENSIONS and path.name[0] != "."]
    if not images:
        raise UserError(f"{folder} holds no images ({', '.join(IMAGE_EXTENSIONS)}); give a video or a folder of frames")
    images.sort(key=lambda path: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path.name)])
    sizes: list[str] = []
    for path in images:
        try:
            with open_regular(path) as file, Image.open(file) as image:
                sizes.append(f"{image.width} x {image.height}")
        except OSError as error:
            raise UserError(f"{path} is not a readable image ({error})") from error
        if sizes[-1] != sizes[0]:
            raise UserError(
                f"{path} has {sizes[-1]} pixels, {images[0].name} {sizes[0]}; the frames of a video have one size"
            )
    return images


def extract_frames(video: Path, folder: Path) -> float:
    """Write the frames of a video to FOLDER/frame-0000.jpg and so on, and remove those of an earlier video.

    Returns:
        Frames per second.
    """
    create_output_dir(folder, option="")
    for path in folder.glob("frame-*.jpg"):
        path.unlink()
    read = _read_animation if video.suffix.lower() in ANIMATIONS else _read_video
    fps, frames = read(video)
    number = -1
    for number, frame in enumerate(frames):
        save_jpeg(frame, folder / f"frame-{number:04}.jpg")
    if number < 0:
        raise UserError(f"{video} holds no frames; give another video")
    return fps


def _read_animation(path: Path) -> tuple[float, Iterator[Image.Image]]:
    try:
        image = Image.open(path)
    except OSError as error:
        raise UserError(f"{path} is not a video that can be read ({error})") from error

    def frames() -> Iterator[Image.Image]:
        with image:
            yield from (frame.convert("RGB") for frame in ImageSequence.Iterator(image))

    return 1000 / (image.info.get("duration") or 1000 / DEFAULT_FPS), frames()


def _read_video(path: Path) -> tuple[float, Iterator[Image.Image]]:
    require("av", "videos other than gif")
    import av

    try:
        container = av.open(str(path))
        if not container.streams.video:
            raise UserError(f"{path} holds no video, only sound; give another file")
    except av.FFmpegError as error:
        raise UserError(f"{path} is not a video that can be read ({error.strerror}); convert it by ffmpeg") from error

    def frames() -> Iterator[Image.Image]:
        with container:
            try:
                for frame in container.decode(video=0):
                    yield frame.to_image().rotate(frame.rotation, expand=True)  # phones store videos sideways
            except av.FFmpegError as error:
                raise UserError(f"{path} is damaged ({error.strerror}); convert it by ffmpeg") from error

    return float(container.streams.video[0].average_rate or DEFAULT_FPS), frames()


def save_jpeg(image: Image.Image, path: Path) -> None:
    """Write a JPEG; an older file stays until the new one is complete."""
    with written_beside(path) as file:
        image.save(file, "JPEG", quality=JPEG_QUALITY)


def write_video(pictures: Sequence[Path], path: Path, fps: float) -> None:
    """Write images of one size as a video; the ending of `path` is the format."""
    kind = path.suffix[1:]
    images = map(_read_picture, pictures)
    with written_beside(path) as file:
        if kind == "gif":
            first, others = Image.fromarray(next(images)), map(Image.fromarray, images)
            first.save(file, "GIF", save_all=True, append_images=others, duration=1000 / fps, loop=0)
        else:
            _encode(images, file, kind, fps)


def _read_picture(path: Path) -> Picture:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def _encode(images: Iterator[Picture], file: Path, kind: str, fps: float) -> None:
    import av

    with av.open(str(file), "w", format=kind) as container:
        stream = container.add_stream(CODECS[kind], rate=Fraction(fps).limit_denominator(1001))
        stream.pix_fmt = "yuv420p"
        if kind == "mp4":
            stream.options = {"crf": "18"}
        else:
            stream.bit_rate = 8_000_000
        for image in images:
            # Colours are stored for pairs of pixels, so sides must be even: the last row or column is repeated.
            even = np.pad(image, [(0, side % 2) for side in image.shape[:2]] + [(0, 0)], mode="edge")
            if not stream.codec_context.is_open:
                stream.height, stream.width = even.shape[:2]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(even, "rgb24")))
        container.mux(stream.encode())
