"""verl's keys of its later training engines, asynchronous training and distillation."""

from __future__ import annotations

from math import ceil

from mppo_migrate.verl_keys.verl_row import (
    NO_PROFILER,
    NOTHING,
    OFF,
    PROFILER,
    TEXT_ONLY,
    Converted,
    Ignored,
    Refused,
    VerlRow,
)

_ENGINES = "{fsdp,veomni,torchtitan,automodel,engine}"
_MEGATRON = Ignored("every role runs on Megatron-Core; <role>.megatron.* is its layout")
_APART = Refused(
    "servers apart from the training ranks have another form in mppo",
    "set rollout.mode: disaggregated (docs/rollout.md)",
)
_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}

ENGINE_ROWS: tuple[VerlRow, ...] = (
    # engines of a role
    *(
        VerlRow(
            f"*.{_ENGINES}.{name}_offload", Converted(f"*.megatron.offload.{ours}", {None: False})
        )
        for name, ours in (("param", "parameters"), ("grad", "gradients"))
    ),
    VerlRow(
        f"{{ref,reward_model}}.{_ENGINES}.optimizer_offload",
        Ignored("the reference is not trained: it has weights alone"),
    ),
    VerlRow(
        f"*.{_ENGINES}.optimizer_offload",
        Converted("*.megatron.offload.optimizer", {None: False}),
    ),
    *(
        VerlRow(f"*.engine.{name}", Converted(f"*.megatron.{ours}"))
        for name, ours in _SIZES.items()
    ),
    VerlRow("*.{engine,torchtitan}.tensor_parallel_size", Converted(f"*.megatron.{_SIZES['tp']}")),
    VerlRow(
        "*.{engine,torchtitan}.pipeline_parallel_size", Converted(f"*.megatron.{_SIZES['pp']}")
    ),
    VerlRow(
        "*.{veomni,fsdp}.{ulysses_parallel_size,ulysses_sequence_parallel_size}",
        Converted(f"*.megatron.{_SIZES['cp']}"),
    ),
    VerlRow("*.veomni.expert_parallel_size", Converted(f"*.megatron.{_SIZES['ep']}")),
    VerlRow(
        "actor.{megatron,veomni,engine}.router_replay.mode",
        Converted("actor.router_replay", {"disabled": "off", None: "off"}),
    ),
    VerlRow("*.{megatron,veomni,engine}.router_replay.{record_file,replay_file}", OFF, NOTHING),
    VerlRow(f"{{actor,ref,critic,reward_model}}.{_ENGINES}", _MEGATRON),
    VerlRow("{actor,ref,critic}.model_engine", _MEGATRON),
    VerlRow("*.megatron.use_remove_padding", Ignored("sequences are always packed")),
    VerlRow("*.megatron.use_megatron_fsdp", OFF, NOTHING),
    VerlRow(
        "*.megatron.use_megatron_fsdp",
        Refused(
            "weights are divided by tensor, pipeline and expert parallelism, not by FSDP",
            "remove it; use_distributed_optimizer divides the optimizer's states over ranks",
        ),
    ),
    VerlRow(
        "model.mtp.enable_train",
        Refused("layers for multi-token prediction are not trained", "remove it"),
        (True,),
    ),
    VerlRow("model.mtp", Ignored("layers for multi-token prediction are left out")),
    # rollout and data
    VerlRow("rollout.{nnodes,n_gpus_per_node}", OFF, NOTHING),
    VerlRow("rollout.{nnodes,n_gpus_per_node}", _APART),
    VerlRow(
        "rollout.total_rollout_steps",
        Refused("counts samples; a run counts steps", "set trainer.total_training_steps"),
    ),
    VerlRow(
        "rollout.ignore_eos", Refused("a response ends with the model's stop token", "remove it")
    ),
    VerlRow(
        "rollout.quantization",
        Refused("the engine has the actor's weights, unquantised", "remove it; set rollout.dtype"),
    ),
    VerlRow(
        "rollout.{skip_tokenizer_init,moe_tensor_parallel_size}",
        Ignored("SGLang decides it by itself"),
    ),
    VerlRow("rollout.profiler.enable", NO_PROFILER, NOTHING),
    VerlRow("rollout.profiler.enable", PROFILER),
    VerlRow("rollout.profiler", NO_PROFILER),
    VerlRow(
        "rollout.checkpoint_engine.backend",
        Ignored("rollout.sync is the route of the weights; distributed is a process group"),
    ),
    VerlRow(
        "data.gen_batch_size",
        Ignored("prompts are requested by data.train_batch_size, and more as they are needed"),
    ),
    VerlRow("data.apply_chat_template_kwargs", OFF, (None, {})),
    VerlRow(
        "data.apply_chat_template_kwargs",
        Refused(
            "the chat template is rendered without arguments of the recipe",
            "write the value into chat_template of the model's tokenizer_config.json, or render "
            "the prompts yourself and set data.apply_chat_template: false",
        ),
    ),
    VerlRow(
        "data.custom_cls",
        Refused("prompts come from files, a task or the Hub", "write them to a file"),
    ),
    VerlRow("data.num_workers", Ignored("prompts are read once, when the run starts")),
    VerlRow("data.max_images_per_prompt", TEXT_ONLY),
    # asynchronous training
    VerlRow("trainer.use_v1", Ignored("it chooses one of verl's trainers; mppo has one")),
    VerlRow(
        "async_training.staleness_threshold",
        Converted("rollout.max_staleness", function=ceil),
    ),
    VerlRow(
        "async_training.partial_rollout",
        Ignored("rollout.max_staleness lets responses go on after an update"),
    ),
    VerlRow(
        "async_training.{trigger_parameter_sync_step,require_batches}",
        Ignored("engines get the weights after every step"),
        (None, 1),
    ),
    VerlRow(
        "async_training.{trigger_parameter_sync_step,require_batches}",
        Refused(
            "engines get the weights after every step of data.train_batch_size prompts",
            "remove it; for fewer transfers, raise data.train_batch_size",
        ),
    ),
    VerlRow("async_training", Ignored("it is an option of verl's queues of samples")),
    # distillation, rewards
    VerlRow("distillation.enabled", OFF, NOTHING),
    VerlRow(
        "distillation.enabled",
        Refused("mppo does not distil from a teacher", "remove distillation.*; rewards train here"),
    ),
    VerlRow("distillation", Ignored("distillation is off: its other options have no effect")),
    VerlRow(
        "trainer.checkpoint",
        Ignored(
            "a checkpoint holds model, optimizer and all other state of a run; "
            "trainer.checkpoint_hf: true also writes a Hugging Face folder"
        ),
    ),
)
