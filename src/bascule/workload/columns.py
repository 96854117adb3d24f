"""Find the role of each column of a table by its name: pixels, frames, seconds, text, .."""

import re
from collections.abc import Iterable, Mapping, Sequence

from bascule.checks import shown
from bascule.errors import ConfigError, QuestionError

ROLES: dict[str, tuple[str, ...]] = {
    "tokens": ("tokens", "num_tokens", "seq_len", "length", "n_tokens", "token_count", "input_ids"),
    "width": ("width", "image_width", "img_width", "video_width", "w"),
    "height": ("height", "image_height", "img_height", "video_height", "h"),
    "size": ("resolution", "size", "image_size", "dimensions", "train_resolution"),
    "image": (
        *("image", "images", "image_path", "img_path", "video", "videos", "video_path", "bytes"),
        *("file_name", "filename", "file", "path"),
    ),
    "frames": ("frames", "num_frames", "n_frames", "nframes", "frame_count", "frame"),
    "duration": ("duration", "duration_seconds", "duration_s", "seconds", "video_duration"),
    "fps": ("fps", "frame_rate", "framerate", "video_fps"),
    "text_tokens": ("text_tokens", "num_text_tokens", "text_len", "caption_tokens"),
    "text": ("caption", "text", "prompt", "cap", "captions", "texts", "prompts", "description"),
    "talk": ("messages", "conversations"),
    "reference": (),
}
"""Names of columns by role, in lower case; the first that a table has counts."""

TEXTS = frozenset(("text", "talk", "text_tokens", "tokens"))
"""Roles that say how much text a sample has."""

_INSTEAD = (  # the second is not used in a table that has the first
    *(("width", "size"), ("width", "image"), ("size", "image"), ("frames", "duration")),
    *(("text_tokens", "text"), ("text_tokens", "talk"), ("text", "talk")),
)
_TEXT = re.compile("(?!negative).*(caption|prompt)s?(_.*)?")
_CLIP = re.compile(
    ".*(frame|duration|second|length|(clip|video)_?len|(^|_)(sec|time|dur)s?(_|$)).*"
)
_PICTURE = re.compile(  # pictures beside the sample itself: for editing, first frames, ..
    "(?!.*(mask|thumb)|(num|n|has|is|no|with|total)_)(.*_)?((image|img|picture|video|control|"
    "conditioning|reference|ref|kontext)s?(_(path|file|name|[0-9]+))*|"
    "(condition|(first|last|start|end)_frame)_(image|img|path|file))"
)
_NEITHER = re.compile(
    "(?!.*(clip|video)_?len).*(stamp|date|created|path|url|file|name|key|(^|_)id|score|len|tokens)s?$"
)
_SEEN = re.compile(".*(image|img|video|clip|youtube|photo|picture|url|width|height|pixel|frame).*")
_SOUND = re.compile("(?!(is|has|no|num|n)_).*(audio|sound|speech|waveform).*")
_A_VALUE = re.compile(r"[0-9.]+|.*[/\\].*")
_MOST_NAMED = 20


def roles_of(
    names: Sequence[str], chosen: Mapping[str, str], *, has_rate: bool = False
) -> dict[str, str]:
    """Return the name of the column for each role.

    Case, and signs between words, do not matter; "size.width" matches as "width", too.

    Args:
        names: All columns of a table.
        chosen: Columns by role, for roles that names do not tell; "" uses none.
        has_rate: True if the trainer resamples clips to a frame rate.

    Raises:
        ConfigError: No column has lengths, or a column that seems to have frames, seconds or text
            would not be used.
    """
    plain = {plain_name(name.rsplit(".")[-1]): name for name in reversed(names)}
    plain |= {plain_name(name): name for name in reversed(names) if "." not in name}
    roles = {
        role: next((plain[name] for name in candidates if name in plain), "")
        for role, candidates in ROLES.items()
    }
    if not (roles["talk"] or roles["text_tokens"] or "text" in chosen):
        roles["text"] = _text_column(plain)
    roles = {role: column for role, column in (roles | dict(chosen)).items() if column}
    for number, column in enumerate(_numbered(roles.get("reference", ""), names)):
        roles[f"reference {number + 1}" if number else "reference"] = column
    for role, column in roles.items():
        last = column.rpartition(".")
        same = [name for name in names if last[1] and name.rpartition(".")[2] == last[2]]
        if len(same) > 1 and role not in chosen:
            text = f"has the columns {named(same)}: say which: --columns {role}=NAME"
            raise QuestionError(text, columns=f"{role}={same[-1]}")
    if missing := [column for column in roles.values() if column not in names]:
        raise ConfigError(f"has no column {shown(missing[0])}; it has {named(names)}")
    for role, spare in _INSTEAD:
        if role in roles and spare not in chosen:
            roles.pop(spare, None)
    if not roles.keys() & {"width", "height", "size", "image"}:
        sound = {"duration"} if "tokens" not in roles else set[str]()
        roles = {role: column for role, column in roles.items() if role in TEXTS | sound}
    if "duration" not in roles and not has_rate:
        roles.pop("fps", None)
    _check(roles, names, chosen, has_rate)
    return roles


def plain_name(name: str) -> str:
    """Return a name in lower case, with "_" for each run of signs but letters and digits."""
    return re.sub("[^a-z0-9]+", "_", name.lower()).strip("_")


def may_be_text(name: str) -> bool:
    """Return False if the name says that the column has no text to train on, such as a path."""
    return not _NEITHER.fullmatch(plain_name(name))


def named(names: Iterable[str]) -> str:
    """Join at most `_MOST_NAMED` names of columns for a message."""
    texts = [name if name.isidentifier() else shown(name) for name in names]
    left = len(texts) - _MOST_NAMED
    return ", ".join([*texts[:_MOST_NAMED], *([f"{left} others"] if left > 0 else [])])


def _text_column(plain: Mapping[str, str]) -> str:
    """Return the one column whose name says text; refuse several."""
    columns = {
        column: None
        for name, column in plain.items()
        if name in ROLES["text"] or (_TEXT.fullmatch(name) and may_be_text(name))
    }
    texts = list(columns)[::-1]  # in the order of the table
    if len(texts) > 1:
        flags = " or ".join(f"--columns text={column}" for column in texts[:_MOST_NAMED])
        likeliest = next((column for column in texts if "long" in column.lower()), texts[0])
        question = f"has {len(texts)} columns of text, so say which is used: {flags}"
        raise QuestionError(question, columns=f"text={likeliest}")
    return texts[0] if texts else ""


def _numbered(name: str, names: Sequence[str]) -> list[str]:
    """Return the columns of a name with any number or none: control_path, control_path_0, .."""
    plain = re.compile(re.escape(re.sub("_[0-9]+$", "", name)) + "(_[0-9]+)?")
    return [column for column in names if name and plain.fullmatch(column)]


def _pictures(roles: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """Return the columns whose names say pictures beside the sample itself."""
    trained = plain_name(roles.get("image", ""))
    kinds = "image|img|picture|video"  # of the sample itself
    if trained:
        kinds = "video" if trained.startswith("video") else "image|img|picture"
    sample = re.compile(f"({kinds})s?(_(path|file|name))*")
    pairs = [(name, plain_name(name)) for name in names if name not in roles.values()]
    return [name for name, text in pairs if _PICTURE.fullmatch(text) and not sample.fullmatch(text)]


def _check(
    roles: Mapping[str, str], names: Sequence[str], chosen: Mapping[str, str], has_rate: bool
) -> None:
    """Refuse a table without lengths, or with an unused column that may have lengths."""
    if not roles:
        hint = "say which: --columns width=W,height=H,frames=F,text=T, or tokens=N"
        if any(_A_VALUE.fullmatch(name.strip()) for name in names):
            hint = f"if its first line has no names, add such a line, else {hint}"
        raise ConfigError(f"none of its columns ({named(names) or 'it has none'}) is known: {hint}")
    for side, other in (("width", "height"), ("height", "width")):
        if side in roles and other not in roles:
            wrong = f"has {side}, but no {other} among {named(names)}"
            raise ConfigError(f"{wrong}: say which: --columns {other}=..")
    if not roles.keys() & {"width", "size", "image"}:
        seen = [name for name in names if _SEEN.fullmatch(plain_name(name))]
        if seen and not chosen.keys() & {"tokens", "image"} and "tokens" not in roles:
            fix = "--columns width=W,height=H, or --columns image= if all samples are text"
            raise ConfigError(f"has text and {shown(seen[0])}, but no width and height: give {fix}")
        sound = [name for name in names if _SOUND.fullmatch(plain_name(name))]
        sound = [roles["duration"]] if "duration" in roles else sound
        is_said = has_rate if "duration" in roles else "tokens" in roles or "duration" in chosen
        if sound and not is_said:
            fix = "give the tokens per second of sound, such as --fps 25, and --columns duration=D"
            raise ConfigError(f"has {sound[0]} and no sizes: {fix}; or count none by duration=")
        return
    if "reference" not in chosen and (pictures := _pictures(roles, names)):
        what = f"has the column {shown(pictures[0])}, which may hold reference pictures"
        fix = f"count them by --columns reference={pictures[0]}, ignore them by reference="
        text = f"{what}: {fix}; or, if they are the samples, say image={pictures[0]}"
        raise QuestionError(text, columns=f"reference={pictures[0]}")
    if plain_name(roles.get("tokens", "")) == "length" and "tokens" not in chosen:
        what = "has sizes and a column 'length', which may be tokens, frames or seconds: say which:"
        fix = "--columns tokens=length, or --columns tokens=,frames=length (or duration=length)"
        raise QuestionError(f"{what} {fix}", columns="tokens=length")
    if "duration" in roles and not (has_rate or "fps" in roles):
        seconds = roles["duration"]
        text = f"has {seconds}, so say how many frames per second are taken: --fps 16"
        raise QuestionError(text, fps=16)
    if "frames" in roles and has_rate and "fps" not in roles:
        raise ConfigError("has no frame rate, which --fps needs: give its column, --columns fps=..")
    if not (roles.keys() | chosen.keys()) & {"frames", "duration"}:
        left = [name for name in names if name not in roles.values() and may_be_text(name)]
        if clips := [name for name in left if _CLIP.fullmatch(plain_name(name))]:
            role = "frames" if "frame" in clips[0].lower() else "duration"
            what = f"has the column {shown(clips[0])}, which may hold frames or seconds: use it by"
            fix = f"--columns frames={clips[0]} or duration={clips[0]}, or say frames= for images"
            raise QuestionError(f"{what} {fix}", columns=f"{role}={clips[0]}")
