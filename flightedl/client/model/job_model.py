"""What a trainer has of the job's model: its declaration, its first values, its parameters, and files of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from flightedl.client.model.declared import declared_arrays
from flightedl.client.model.election import elect_and_initialize
from flightedl.client.model.parameters import Parameters
from flightedl.client.model.saving import ModelSaves
from flightedl.client.model.trees import Tree, tree_of
from flightedl.client.once import Once
from flightedl.client.participation import Participation
from flightedl.client.process import TrainerProcess
from flightedl.coordination.checkpoint_places import write_model
from flightedl.domain.consistency.modes import Mode, Sync
from flightedl.domain.model.optimizers import SGD, Optimizer
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan, plan_for
from flightedl.errors import DeclarationError, UnavailableError, UsageError
from flightedl.formats.model_files import format_of
from flightedl.kernels.half_precision import check_kind
from flightedl.messages.base import encode
from flightedl.messages.checkpoints import SaveModelReply, SaveModelRequest
from flightedl.messages.declarations import DeclaredModel, ModelDeclaration, ParameterDeclaration
from flightedl.recording.elections import followed_election
from flightedl.recording.steps import trainer_steps

Array = npt.NDArray[np.generic]


class JobModel:
    """The model of one session.

    Args:
        process: The trainer's.
        participation: Knows which batch it works on.
    """

    def __init__(self, process: TrainerProcess, participation: Participation) -> None:
        self._process = process
        self._participation = participation
        self._parameters: Parameters | None = None
        self._saves = ModelSaves(process.coordinator, process.keys, process.registration, process.waiting)

    def declare(
        self,
        initial: Any,
        *,
        optimizer: Optimizer | str | None,
        mode: Mode | str | None,
        wire: str,
        error_feedback: bool,
        dtypes: Mapping[str, str | type[np.generic]] | None,
    ) -> Parameters:
        """Declare the model, and have its values. Errors as of ``Job.parameters``."""
        if self._parameters is not None:
            raise UsageError("this job already has its parameters: declare all of them in one call")
        tree = tree_of(initial)
        check_kind(wire)
        chosen_mode = Sync() if mode is None else Mode.chosen(mode)
        chosen_optimizer = SGD(lr=0.01) if optimizer is None else Optimizer.chosen(optimizer)
        if error_feedback and not wire:
            raise UsageError('error_feedback is about what wire="bfloat16" or "float16" rounds off: give a wire, too')
        values = declared_arrays(initial if tree is None else tree.leaves, dtypes or {})
        specs = [ParameterSpec(name, value.shape, value.dtype.name) for name, value in values.items()]
        for name, value in values.items():
            if not np.isfinite(value).all():
                raise UsageError(f"the initial value of parameter {name!r} has NaN or infinity")
        declaration = ModelDeclaration(
            parameters=[ParameterDeclaration(name=s.name, shape=list(s.shape), dtype=s.dtype) for s in specs],
            optimizer=chosen_optimizer.to_json(),
            mode=chosen_mode.to_json(),
            wire=wire,
        )
        declared = self._process.ask_master("declare_model", encode(declaration), DeclaredModel)
        plan = plan_for(specs, declared.pservers, declared.cut_for)
        if plan.hash != declared.plan_hash:
            raise DeclarationError(
                "this trainer computes another shard plan: run the same flightedl version everywhere"
            )
        self._process.wait_for_pservers(declared.pservers)
        self._elect(plan, values)
        self._parameters = self._connected(plan, declared, tree, error_feedback=error_feedback)
        return self._parameters

    @property
    def is_declared(self) -> bool:
        """Whether there is a model."""
        return self._parameters is not None

    def _elect(self, plan: ShardPlan, values: Mapping[str, Array]) -> None:
        """Return when the model has its first values; from then on only that model is worked for."""
        process = self._process
        elected = elect_and_initialize(
            plan,
            values,
            registration=process.registration,
            coordinator=process.coordinator,
            keys=process.keys,
            directory=process.directory,
            servers=process.servers,
            waiting=process.waiting,
            recorder=process.recorder,
        )
        process.servers.follow(process.keys.init_params, followed_election(process.recorder, elected))

    def _connected(
        self, plan: ShardPlan, declared: DeclaredModel, tree: Tree | None, *, error_feedback: bool
    ) -> Parameters:
        """The parameters, with the job's present values."""
        process = self._process
        mode = Mode.from_json(declared.present_mode)
        rule = Optimizer.from_json(declared.declaration.optimizer)
        parameters = Parameters(
            plan,
            mode,
            process.servers,
            self._participation,
            process.waiting,
            process.clock,
            rule.clip_norm,
            declared.declaration.wire,
            error_feedback,
            partial(trainer_steps, process.recorder, process.trainer),
            unclipped=rule.unclipped(spec.name for spec in plan.parameters),
            tree=tree,
        )
        self._participation.take(parameters, mode)
        parameters.refresh()
        return parameters

    def save(self, target: str, form: str, *, server: bool, once: Once | None) -> bool:
        """Write the model as one file, or see that another trainer does. Errors as of ``Job.save_model``."""
        parameters = self._parameters
        if parameters is None:
            raise UsageError("there is no model to save: declare it with job.parameters first")
        format_of(target, form)

        def write(require_request: Callable[[], None]) -> None:
            def require() -> None:
                if once is not None:
                    once.require()
                require_request()

            if server:
                require()
                self._save_on_master(SaveModelRequest(url=target, format=form))
                return
            parameters.pull()
            specs = [ParameterSpec(key, value.shape, value.dtype.name) for key, value in parameters.items()]
            write_model(target, form, specs, zip(specs, parameters.values(), strict=True), require)

        return self._saves.save(target, self._participation.epoch, write)

    def _save_on_master(self, request: SaveModelRequest) -> None:
        waiting = self._process.waiting()
        for _ in waiting.steps():
            reply = self._process.ask_master("save_model", encode(request), SaveModelReply)
            if reply.state == "written":
                break
            if reply.state == "failed":
                waiting.over()
                raise UnavailableError(f"the model was not saved: {reply.error}")
            waiting.patiently("the master to write the model")
        waiting.over()

    def close(self, why: str) -> None:
        """Nothing is pushed or pulled any more; ``why`` is told to whoever still asks."""
        if self._parameters is not None:
            self._parameters.close(why)
