"""verl's keys of rollout, data, reward and the run, and what happens to each."""

from __future__ import annotations

from mppo_migrate.verl_keys.verl_row import (
    NO_PROFILER,
    NOTHING,
    OFF,
    TEXT_ONLY,
    Converted,
    Ignored,
    Refused,
    VerlRow,
)

_RAY = Ignored("mppo does not use Ray: torchrun, srun or mpirun starts the ranks")
_REWARD_WORKER = Ignored("scores come from reward.*; functions run in processes of the ranks")
_ONE_TURN = Ignored("without rollout.agent, a response is one turn")
_AGENT_LOOP = Refused("an agent has another form in mppo", "set rollout.agent.path")
_DUMP = Refused(
    "dumps are written to the folder rollouts in the run folder",
    "remove it; set trainer.dump_rollouts: true",
)

RUN_ROWS: tuple[VerlRow, ...] = (
    # rollout
    VerlRow(
        "rollout.name",
        Refused("vLLM and TensorRT-LLM are not supported", "set rollout.name: sglang"),
        ("vllm", "trtllm"),
    ),
    VerlRow("rollout.name", Converted("rollout.name", {"hf": "local"}), ("hf",)),
    VerlRow(
        "rollout.mode",
        Ignored("requests to servers are asynchronous; rollout.mode is where servers run"),
        ("sync", "async"),
    ),
    VerlRow("rollout.do_sample", Ignored("responses are always sampled"), (True,)),
    VerlRow(
        "rollout.do_sample",
        Refused("greedy responses have no log-probabilities to train on", "remove it"),
    ),
    VerlRow(
        "rollout.val_kwargs.do_sample", Ignored("the temperature decides it: 0 is greedy"), (True,)
    ),
    VerlRow(
        "rollout.val_kwargs.do_sample",
        Converted("rollout.val_kwargs.temperature", {False: 0}),
        (False,),
    ),
    VerlRow(
        "rollout.{free_cache_engine,multi_stage_wake_up,layered_summon}",
        Ignored("a colocated engine always frees its memory during training"),
    ),
    VerlRow(
        "{rollout.partial_rollout,trainer.rollout_ahead}",
        Ignored("rollout.max_staleness says how old tokens may be"),
        NOTHING,
    ),
    VerlRow("rollout.partial_rollout", Converted("rollout.max_staleness", {True: 1}), (True,)),
    VerlRow("trainer.rollout_ahead", Converted("rollout.max_staleness")),
    VerlRow(
        "rollout.enable_chunked_prefill",
        Ignored("SGLang splits long prompts by itself"),
        (True, None),
    ),
    VerlRow(
        "rollout.enable_chunked_prefill",
        Converted("rollout.server_args.chunked_prefill_size", {False: -1}),
    ),
    VerlRow("rollout.enable_prefix_caching", Ignored("SGLang shares prefixes"), (True, None)),
    VerlRow(
        "rollout.enable_prefix_caching",
        Converted("rollout.server_args.disable_radix_cache", {False: True}),
    ),
    VerlRow("rollout.max_model_len", Ignored("the model's own limit is used"), (None,)),
    VerlRow("rollout.max_model_len", Converted("rollout.server_args.context_length")),
    VerlRow(
        "rollout.{load_format,layer_name_map}",
        Ignored("the engine gets its weights from the actor"),
    ),
    VerlRow("rollout.calculate_log_probs", Ignored("the engine always returns log-probabilities")),
    VerlRow(
        "rollout.{disable_log_stats,prometheus,trace,logprobs_mode,scheduling_policy,seed}",
        Ignored("these options of verl's servers have no counterpart"),
    ),
    VerlRow("rollout.{data_parallel_size,pipeline_model_parallel_size}", OFF, (*NOTHING, 1)),
    VerlRow(
        "rollout.data_parallel_size", Refused("has another name in mppo", "set rollout.servers")
    ),
    VerlRow("rollout.multi_turn", _ONE_TURN, NOTHING),
    VerlRow(
        "rollout.multi_turn.enable",
        Converted("rollout.agent.path", {True: "mppo.agents.hermes:HermesAgent"}),
        (True,),
    ),
    VerlRow("rollout.multi_turn.max_assistant_turns", Converted("rollout.agent.max_turns")),
    VerlRow(
        "rollout.multi_turn.max_parallel_calls", Converted("rollout.agent.arguments.max_calls")
    ),
    VerlRow(
        "rollout.multi_turn.max_tool_response_length",
        Converted("rollout.agent.arguments.max_characters"),
    ),
    VerlRow(
        "rollout.multi_turn.tool_config_path",
        Refused("tools are Python functions", "list them under rollout.agent.tools"),
    ),
    VerlRow("rollout.multi_turn.interaction_config_path", _AGENT_LOOP),
    VerlRow("rollout.multi_turn.format", Ignored("tool calls have the Hermes format"), ("hermes",)),
    VerlRow("rollout.multi_turn.format", _AGENT_LOOP),
    VerlRow("rollout.multi_turn", Ignored("an agent's turns are limited by their number")),
    VerlRow("rollout.agent.num_workers", Ignored("rollout.agent.processes is per rank")),
    VerlRow(
        "rollout.agent.{default_agent_loop,agent_loop_config_path}",
        _ONE_TURN,
        (*NOTHING, "single_turn_agent"),
    ),
    VerlRow("rollout.agent.{default_agent_loop,agent_loop_config_path}", _AGENT_LOOP),
    VerlRow("rollout.agent.{custom_async_server,agent_loop_manager_class}", OFF, NOTHING),
    VerlRow("rollout.engine_kwargs.{vllm,trtllm}", Ignored("the engine is SGLang")),
    VerlRow(
        "rollout.checkpoint_engine.backend",
        Converted("rollout.sync", {"naive": "tensor"}),
        ("naive",),
    ),
    VerlRow(
        "rollout.{ignore_eos,skip,skip_rollout,quantization,cudagraph_capture_sizes,"
        "enable_rollout_routing_replay}",
        OFF,
        NOTHING,
    ),
    VerlRow(
        "rollout.enable_rollout_routing_replay",
        Refused("has another name in mppo", "set actor.router_replay: R3"),
    ),
    # data
    VerlRow(
        "data.{return_raw_input_ids,return_raw_chat,return_full_prompt,return_multi_modal_inputs}",
        Ignored("a prompt keeps its messages, text and tokens"),
    ),
    VerlRow(
        "data.{dataloader_num_workers,filter_overlong_prompts_workers,validation_shuffle}",
        Ignored("prompts are read once, when the run starts"),
    ),
    VerlRow("data.{image_key,video_key,audio_key,image_patch_size}", TEXT_ONLY),
    VerlRow("data.reward_fn_key", Ignored("the column is data_source"), ("data_source",)),
    VerlRow(
        "data.reward_fn_key",
        Refused(
            "the column that picks a verifier is data_source",
            "rename it, or set reward.verifier for all rows",
        ),
    ),
    VerlRow("data.{train_max_samples,val_max_samples}", Ignored("all rows are used"), (None, -1)),
    VerlRow("data.train_max_samples", Converted("data.train_size")),
    VerlRow("data.val_max_samples", Converted("data.val_size")),
    VerlRow("data.seed", Ignored("the seed is 0"), (None,)),
    VerlRow(
        "data.{use_shm,custom_cls,sampler,datagen,gen_batch_size,tool_config_path,"
        "mm_processor_kwargs}",
        OFF,
        NOTHING,
    ),
    # reward
    VerlRow(
        "reward_model.reward_manager",
        Ignored("scores come from reward.*: a rule by data_source, a function, or a server"),
        ("naive", "prime", "dapo", "batch"),
    ),
    VerlRow("reward_model.{sandbox_fusion,sandbox_fusion_url}", OFF, NOTHING),
    VerlRow("reward_model.{sandbox_fusion_url,sandbox_fusion.url}", Converted("reward.url")),
    VerlRow("reward_model.sandbox_fusion.max_concurrent", Converted("reward.kwargs.concurrency")),
    VerlRow(
        "reward_model.sandbox_fusion.memory_limit_mb", Converted("reward.kwargs.memory_limit_mb")
    ),
    VerlRow(
        "reward_model.launch_reward_fn_async",
        Ignored("responses are scored while others are generated"),
    ),
    VerlRow(
        "reward_model.reward_kwargs.overlong_buffer_cfg.enable",
        Converted("reward.overlong_buffer_len", {False: 0}),
        (False,),
    ),
    VerlRow(
        "reward_model.reward_kwargs.{overlong_buffer_cfg,max_resp_len}",
        Ignored("reward.overlong_buffer_len is the buffer, before data.max_response_length"),
    ),
    VerlRow(
        "reward_model.reward_kwargs",
        Ignored("it is an argument of verl's reward managers; scores come from reward.*"),
    ),
    VerlRow("custom_reward_function", OFF, NOTHING),
    VerlRow(
        "custom_reward_function.name", Ignored("no file is named in custom_reward_function.path")
    ),
    VerlRow("reward.{num_workers,reward_manager,reward_loop}", _REWARD_WORKER),
    # trainer
    VerlRow("trainer.balance_batch", Ignored("sequences are always balanced by length")),
    VerlRow(
        "{trainer,critic,actor}.{use_legacy_worker_impl,ray_wait_register_center_timeout}", _RAY
    ),
    VerlRow("{ray_init,ray_kwargs}", _RAY),
    VerlRow(
        "trainer.device",
        Refused(
            "the devices are CPU and CUDA GPUs",
            "remove it; the environment variable MPPO_DEVICE chooses",
        ),
        ("cpu", "npu", "xpu"),
    ),
    VerlRow("trainer.device", Ignored("MPPO_DEVICE chooses; without it, a GPU if there is one")),
    VerlRow(
        "trainer.resume_from_path", Converted("trainer.resume_from_path", {False: None}), (False,)
    ),
    VerlRow(
        "trainer.{rollout_data_dir,val_only,default_hdfs_dir,profile_steps,"
        "del_local_ckpt_after_load,esi_redundant_time,npu_profile,remove_previous_ckpt_in_save}",
        OFF,
        NOTHING,
    ),
    VerlRow("trainer.rollout_data_dir", _DUMP),
    VerlRow(
        "trainer.log_val_generations",
        Ignored("trainer.sample_table_rows says how many responses are shown"),
    ),
    VerlRow(
        "trainer.val_only",
        Refused("mppo/train.py always trains", "remove it; mppo/evaluate.py scores a model folder"),
    ),
    VerlRow(
        "trainer.{default_hdfs_dir,del_local_ckpt_after_load}",
        Refused("checkpoints stay where they are written", "set trainer.default_local_dir"),
    ),
    VerlRow(
        "trainer.esi_redundant_time",
        Refused("has another name in mppo", "set trainer.checkpoint_must_save_by"),
    ),
    VerlRow(
        "trainer.remove_previous_ckpt_in_save",
        Refused("has another name in mppo", "set trainer.max_ckpt_to_keep: 1"),
    ),
    VerlRow("trainer.profile_steps", Converted("trainer.profile.steps")),
    VerlRow(
        "trainer.{npu_profile,controller_nsight_options,worker_nsight_options}",
        NO_PROFILER,
    ),
)
