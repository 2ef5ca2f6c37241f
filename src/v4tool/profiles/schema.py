"""Pydantic models of a profile's file, a case and a resolved profile: frozen, no unknown keys.

Follows SPEC section 7 for the cases. Settings that affect results are in `[numerics]`, others at
the top level. Left out: defaults of missing values (`resolve`).
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    StrictBool,
    StrictFloat,
    model_validator,
)

from v4tool.errors import ProfileError
from v4tool.profiles import setting_values
from v4tool.profiles.setting_values import Accumulate, Backend

CASE_FILE_NAME = "deepseek-v4-flash-vt-{id}.safetensors"

Count = Annotated[int, PlainValidator(setting_values.count)]
Text = Annotated[str, Field(min_length=1)]
PathText = Annotated[str, PlainValidator(setting_values.path_text)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Expect(_Frozen):
    """Published figures of other engines for the next token after a case (an anchor).

    id: the token; logprob: lowest and highest published log-probability, in nats; margin: its
    distance in nats to the token runner_up; within: tolerance in nats for both.
    """

    id: Count
    logprob: tuple[StrictFloat, StrictFloat] | None = None
    margin: StrictFloat | None = None
    runner_up: Count | None = None
    within: StrictFloat = 0.5

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.logprob is not None and not self.logprob[0] <= self.logprob[1] <= 0:
            raise ValueError("expected logprob = [lowest, highest], neither above 0")
        if (self.margin is None) != (self.runner_up is None):
            raise ValueError("expected margin and runner_up together")
        if (self.margin is not None and self.margin < 0) or self.within <= 0:
            raise ValueError("expected margin from 0 up and within above 0")
        return self


class Case(_Frozen):
    """One prompt with frozen token ids, decode steps, and the file name of its recording.

    input_ids: the prompt, never empty in a resolved profile; text: informative, may be missing;
    decode: main-stack decode steps after the prefill; decode_ids: their ids if they are fixed (else
    greedy); file: the recording's name without directory; expect: published figures, anchors only.
    """

    id: Annotated[str, PlainValidator(setting_values.case_id)]
    subject: str = ""
    text: Text | None = None
    input_ids: tuple[Count, ...] = ()
    decode: Count = 0
    decode_ids: tuple[Count, ...] = ()
    file: Annotated[str, PlainValidator(setting_values.recording_name)] = ""
    expect: Expect | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: object) -> object:
        """Defaults: the file name from the id, the number of decode steps from their ids."""
        if not isinstance(data, dict):
            return data
        filled = dict(data)
        if isinstance(data.get("id"), str):
            filled.setdefault("file", CASE_FILE_NAME.format(id=data["id"]))
        if isinstance(data.get("decode_ids"), list | tuple):
            filled.setdefault("decode", len(data["decode_ids"]))
        return filled

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.text is None and not self.input_ids:
            raise ValueError("expected text or at least one of input_ids, found neither")
        if "input_ids" in self.model_fields_set and not self.input_ids:
            raise ValueError("expected at least one of input_ids, found none")
        if self.decode_ids and self.decode != len(self.decode_ids):
            raise ValueError(
                f"expected as many decode_ids as decode steps, "
                f"found {len(self.decode_ids)} ids for {self.decode} steps"
            )
        return self


class CheckpointSettings(_Frozen):
    """Where the checkpoint comes from: a directory, `synth`, or a repository in the local cache.

    config: a shipped configuration ("nano", "flash") or a config.json, used without a checkpoint;
    revision: branch, tag or commit of the repository.
    """

    config: PathText | None = None
    path: PathText | None = None
    synth: StrictBool = False
    repo: Annotated[str, PlainValidator(setting_values.repository)] | None = None
    revision: Text = "main"

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is not None) + self.synth + (self.repo is not None) > 1:
            raise ValueError("expected at most one of path, synth and repo")
        if self.config is None and self.path is None:
            raise ValueError("expected config or path, found neither")
        return self


class NumericsTable(_Frozen):
    """The table `[numerics]`."""

    accumulate: Annotated[str, PlainValidator(setting_values.accumulate)] | None = None


class ProfileFile(_Frozen):
    """A whole profile file; None: the file does not say."""

    summary: str = ""
    threads: Annotated[int | str, PlainValidator(setting_values.threads)] | None = None
    seed: Annotated[int, PlainValidator(setting_values.seed)] | None = None
    out_dir: Annotated[Path, PlainValidator(setting_values.path)] | None = None
    backend: Annotated[str, PlainValidator(setting_values.backend)] | None = None
    cases_file: PathText | None = None
    checkpoint: CheckpointSettings | None = None
    numerics: NumericsTable = NumericsTable()
    cases: tuple[Case, ...] = ()


class CasesFile(_Frozen):
    """A file of cases that several profiles share."""

    cases: tuple[Case, ...]


class Profile(_Frozen):
    """Everything that a run takes from outside, resolved.

    source: the file; ckpt: the checkpoint's directory where one was named (see
    `locate_checkpoint`); config: the config.json that describes the model, the checkpoint's own
    where one was named; threads: a number, never "auto"; origin: key -> where the value came from.
    """

    name: str
    source: Path
    summary: str
    threads: int
    seed: int
    out_dir: Path
    accumulate: Accumulate
    backend: Backend
    ckpt: Path | None
    config: Path
    checkpoint: CheckpointSettings
    cases: tuple[Case, ...]
    origin: Annotated[Mapping[str, str], AfterValidator(MappingProxyType), PlainSerializer(dict)]

    def case(self, case_id: str) -> Case:
        """The case of that id. ProfileError lists the known ids and suggests a close one."""
        known = {case.id: case for case in self.cases}
        if case_id not in known:
            raise ProfileError(
                f"unknown case "
                f"{setting_values.short(case_id)}{setting_values.close(case_id, known)}: "
                f"profile {self.name} has {', '.join(known) or 'none'}"
            )
        return known[case_id]

    def settings(self) -> tuple[tuple[str, str, str], ...]:
        """(key, value, origin) of every setting, for a table of where everything comes from."""
        shown = {
            "profile": self.name,
            "ckpt": self._checkpoint_in_words(),
            "config": str(self.config),
            "threads": str(self.threads),
            "seed": str(self.seed),
            "out_dir": str(self.out_dir),
            "accumulate": self.accumulate,
            "backend": self.backend,
            "cases": f"{len(self.cases)} cases",
        }
        return tuple((key, value, self.origin[key]) for key, value in shown.items())

    def _checkpoint_in_words(self) -> str:
        if self.ckpt is not None:
            return str(self.ckpt)
        if self.checkpoint.synth:
            return f"made from {self.config.name} on first use"
        if self.checkpoint.repo is None:
            return "none"
        return (
            f"{self.checkpoint.repo} at {self.checkpoint.revision}, "
            f"from the local Hugging Face cache"
        )
