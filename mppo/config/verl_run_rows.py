"""What becomes of verl's keys of rollout, data, reward and the run."""

from __future__ import annotations

from mppo.config.verl_row import (
    NO_PROFILER,
    NOTHING,
    OFF,
    PROFILER,
    Converted,
    Ignored,
    Refused,
    Row,
)

_RAY = Ignored("there is no Ray: torchrun, srun or mpirun starts the ranks")
_TEXT_ONLY = Ignored("prompts are texts; there are no images, videos or sounds")
_REWARD_WORKER = Ignored("it describes verl's reward model workers; reward.* says who scores")
_MULTI_TURN = Ignored("a prompt has one response; there are no turns or tools")
_DUMP = Refused(
    "a run writes responses to samples.jsonl in its folder, some at its start, middle and end",
    "remove it; trainer.sample_table_rows says how many, a reward function sees every response",
)

RUN_ROWS: tuple[Row, ...] = (
    # rollout
    Row(
        "rollout.name",
        Refused("there is no vLLM or TensorRT-LLM", "set rollout.name: sglang"),
        ("vllm", "trtllm"),
    ),
    Row("rollout.name", Converted("rollout.name", {"hf": "local"}), ("hf",)),
    Row(
        "rollout.mode",
        Ignored("requests to servers are asynchronous; rollout.mode says where servers are"),
        ("sync", "async"),
    ),
    Row("rollout.do_sample", Ignored("responses are drawn"), (True,)),
    Row(
        "rollout.do_sample",
        Refused("greedy responses have no log-probabilities to train on", "remove it"),
    ),
    Row("rollout.val_kwargs.do_sample", Ignored("the temperature says it: 0 is greedy"), (True,)),
    Row(
        "rollout.val_kwargs.do_sample",
        Converted("rollout.val_kwargs.temperature", {False: 0}),
        (False,),
    ),
    Row(
        "rollout.{free_cache_engine,multi_stage_wake_up,layered_summon}",
        Ignored("a colocated engine always gives its memory back while the models train"),
    ),
    Row(
        "rollout.enable_chunked_prefill",
        Ignored("SGLang splits long prompts by itself"),
        (True, None),
    ),
    Row(
        "rollout.enable_chunked_prefill",
        Converted("rollout.server_args.chunked_prefill_size", {False: -1}),
    ),
    Row("rollout.enable_prefix_caching", Ignored("SGLang shares prefixes"), (True, None)),
    Row(
        "rollout.enable_prefix_caching",
        Converted("rollout.server_args.disable_radix_cache", {False: True}),
    ),
    Row("rollout.max_model_len", Ignored("the model's own length counts"), (None,)),
    Row("rollout.max_model_len", Converted("rollout.server_args.context_length")),
    Row(
        "rollout.{load_format,layer_name_map}",
        Ignored("the engine gets its weights from the actor"),
    ),
    Row("rollout.calculate_log_probs", Ignored("the engine always returns log-probabilities")),
    Row(
        "rollout.{disable_log_stats,prometheus,trace,logprobs_mode,scheduling_policy,seed}",
        Ignored("these options of verl's servers have no counterpart"),
    ),
    Row("rollout.{data_parallel_size,pipeline_model_parallel_size}", OFF, (*NOTHING, 1)),
    Row("rollout.data_parallel_size", Refused("is another key here", "set rollout.servers")),
    Row("rollout.{multi_turn,agent}", _MULTI_TURN, NOTHING),
    Row(
        "rollout.multi_turn.enable",
        Refused("a prompt has one response; there are no turns or tools", "remove it"),
    ),
    Row("rollout.multi_turn", _MULTI_TURN),
    Row("rollout.agent", _MULTI_TURN),
    Row("rollout.engine_kwargs.{vllm,trtllm}", Ignored("the engine is SGLang")),
    Row(
        "rollout.checkpoint_engine.backend",
        Converted("rollout.sync", {"naive": "tensor"}),
        ("naive",),
    ),
    Row(
        "rollout.{ignore_eos,skip,skip_rollout,quantization,cudagraph_capture_sizes,"
        "enable_rollout_routing_replay}",
        OFF,
        NOTHING,
    ),
    Row(
        "rollout.enable_rollout_routing_replay",
        Refused("is another key here", "set actor.router_replay: R3"),
    ),
    # data
    Row(
        "data.{return_raw_input_ids,return_raw_chat,return_full_prompt,return_multi_modal_inputs}",
        Ignored("a prompt keeps its messages, text and tokens"),
    ),
    Row(
        "data.{dataloader_num_workers,filter_overlong_prompts_workers,validation_shuffle}",
        Ignored("prompts are read once, when the run starts"),
    ),
    Row("data.{image_key,video_key,audio_key,image_patch_size}", _TEXT_ONLY),
    Row("data.reward_fn_key", Ignored("the column is data_source"), ("data_source",)),
    Row(
        "data.reward_fn_key",
        Refused(
            "the column that picks a verifier is data_source",
            "rename it, or set reward.verifier for all rows",
        ),
    ),
    Row("data.{train_max_samples,val_max_samples}", Ignored("all rows are used"), (None, -1)),
    Row("data.train_max_samples", Converted("data.train_size")),
    Row("data.val_max_samples", Converted("data.val_size")),
    Row("data.seed", Ignored("the seed is 0"), (None,)),
    Row(
        "data.{use_shm,custom_cls,sampler,datagen,gen_batch_size,tool_config_path,"
        "apply_chat_template_kwargs,mm_processor_kwargs}",
        OFF,
        NOTHING,
    ),
    # reward
    Row("reward_model.enable", Ignored("reward.* says who scores"), NOTHING),
    Row(
        "reward_model.enable",
        Refused(
            "no reward model runs within the trainer",
            "serve it, and set reward.name: remote and reward.url "
            "(docs/data_and_rewards.md has the request); remove reward_model.enable",
        ),
    ),
    Row(
        "reward_model.reward_manager",
        Ignored("reward.* says who scores: a rule by data_source, a function, or a server"),
        ("naive", "prime", "dapo", "batch"),
    ),
    Row("reward_model.{sandbox_fusion,sandbox_fusion_url}", OFF, NOTHING),
    Row(
        "reward_model.{sandbox_fusion_url,sandbox_fusion.url}",
        Refused(
            "programs run in a sandbox of mppo's own",
            "remove it: reward.name: rule runs data sources humaneval, mbpp and code, "
            "reward.verifier: code all others",
        ),
    ),
    Row("reward_model.sandbox_fusion", Ignored("reward.kwargs.sandbox has the sandbox's limits")),
    Row(
        "reward_model.launch_reward_fn_async",
        Ignored("responses are scored while others are generated"),
    ),
    Row(
        "reward_model.reward_kwargs.overlong_buffer_cfg.enable",
        Converted("reward.overlong_buffer_len", {False: 0}),
        (False,),
    ),
    Row(
        "reward_model.reward_kwargs.{overlong_buffer_cfg,max_resp_len}",
        Ignored("reward.overlong_buffer_len says it, before data.max_response_length"),
    ),
    Row("reward_model", _REWARD_WORKER),
    Row("custom_reward_function", OFF, NOTHING),
    Row("custom_reward_function.name", Ignored("no file is named in custom_reward_function.path")),
    Row("reward.{num_workers,reward_manager,reward_loop}", _REWARD_WORKER),
    # trainer
    Row("trainer.balance_batch", Ignored("sequences are always shared out by length")),
    Row("{trainer,critic,actor}.{use_legacy_worker_impl,ray_wait_register_center_timeout}", _RAY),
    Row("{ray_init,ray_kwargs}", _RAY),
    Row(
        "trainer.device",
        Refused("devices are CPU and GPU", "remove it; the variable MPPO_DEVICE chooses"),
        ("cpu", "npu", "xpu"),
    ),
    Row("trainer.device", Ignored("MPPO_DEVICE chooses; without it, a GPU where there is one")),
    Row("trainer.resume_from_path", Converted("trainer.resume_from_path", {False: None}), (False,)),
    Row(
        "trainer.{rollout_data_dir,validation_data_dir,val_only,default_hdfs_dir,profile_steps,"
        "del_local_ckpt_after_load,esi_redundant_time,npu_profile,remove_previous_ckpt_in_save}",
        OFF,
        NOTHING,
    ),
    Row("trainer.{rollout_data_dir,validation_data_dir}", _DUMP),
    Row(
        "trainer.log_val_generations",
        Ignored("trainer.sample_table_rows says how many responses are shown"),
    ),
    Row(
        "trainer.val_only",
        Refused("a run trains", "remove it; mppo/evaluate.py scores a model folder"),
    ),
    Row(
        "trainer.{default_hdfs_dir,del_local_ckpt_after_load}",
        Refused("checkpoints stay where they are written", "set trainer.default_local_dir"),
    ),
    Row(
        "trainer.esi_redundant_time",
        Refused("is another key here", "set trainer.checkpoint_must_save_by"),
    ),
    Row(
        "trainer.remove_previous_ckpt_in_save",
        Refused("is another key here", "set trainer.max_ckpt_to_keep: 1"),
    ),
    Row("trainer.profile_steps", PROFILER),
    Row(
        "trainer.{npu_profile,controller_nsight_options,worker_nsight_options}",
        NO_PROFILER,
    ),
)
