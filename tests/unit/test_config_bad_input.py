"""The tables of bad recipes: each gives one clear message and exit code 2.

Each row makes one error in a good recipe. Layout rows are checked for four ranks.
"""

from __future__ import annotations

import re

import pytest
from bad_recipe import GOOD, assert_one_fault, refusal, write_files

from mppo.config.checks import load_checked
from mppo.train import main

# errors of the file itself: name, text, key, message
DOCUMENTS = [
    ("no YAML", "actor: [1, 2", "--config", "not valid YAML"),
    ("a tab for indentation", "actor:\n\toptim: 1", "--config", "not valid YAML"),
    ("a list at the top", "- actor\n- critic", "--config", "of type list, not a mapping"),
    ("a number at the top", "3", "--config", "of type int, not a mapping"),
    ("a key twice", "actor: {ppo_epochs: 1}\nactor: {ppo_epochs: 2}", "--config", "is given twice"),
    ("a key twice inside", "actor: {shuffle: true, shuffle: false}", "--config", "is given twice"),
    ("two documents", "actor: {}\n---\ncritic: {}", "--config", "not valid YAML"),
    ("an unknown tag", "actor: !!python/object:os.system {}", "--config", "not valid YAML"),
    ("a base that is missing", GOOD + "base: nowhere.yaml", "--config", "cannot be read"),
    ("a base that is itself", GOOD + "base: recipe.yaml", "base", "name each other as base"),
    ("a base that is a number", GOOD + "base: 3", "base", "is not a file name"),
    ("a number for a key", GOOD + "3: x", "3", "a key must be a word"),
]

# one setting too many: name, override, key, message
SETTINGS = [
    ("an unknown section", "actr.lr=1", "actr", "did you mean actor?"),
    ("an unknown key", "actor.ppo_mini_batch=4", "actor.ppo_mini_batch",
     "did you mean actor.ppo_mini_batch_size?"),
    ("a key in the wrong section", "actor.train_batch_size=4", "actor.train_batch_size",
     "write data.train_batch_size"),
    ("a key without its section", "lr=1e-6", "lr", "write actor.optim.lr"),
    ("an unknown key deep down", "actor.megatron.tensor_parallel_size=2",
     "actor.megatron.tensor_parallel_size", "tensor_model_parallel_size?"),
    ("no equals sign", "actor.optim.lr", "command line", "is not a setting"),
    ("an empty key", "=3", "command line", "is not a setting"),
    ("an empty part", "actor..lr=3", "command line", "is not a setting"),
    ("an open bracket", "data.train_files=[a.jsonl", "data.train_files", "not valid YAML"),
    ("verl's global micro-batch", "actor.ppo_micro_batch_size=4", "actor.ppo_micro_batch_size",
     "ppo_micro_batch_size_per_gpu"),
    ("verl's misspelt gamma", "algorithm.gemma=1", "algorithm.gemma", "algorithm.gamma"),
    ("a word for a number", "actor.optim.lr=fast", "actor.optim.lr", "valid number"),
    ("a fraction for a count", "data.train_batch_size=8.5", "data.train_batch_size", "integer"),
    ("true for a count", "rollout.n=true", "rollout.n", "not a number"),
    ("false for a rate", "actor.optim.lr=false", "actor.optim.lr", "not a number"),
    ("a word for a token budget", "actor.ppo_max_token_len_per_gpu=most",
     "actor.ppo_max_token_len_per_gpu", "give an integer; or choose one of: auto"),
    ("a token budget of nothing", "critic.ppo_max_token_len_per_gpu=0",
     "critic.ppo_max_token_len_per_gpu", "give a value > 0; or choose one of: auto"),
    ("true for a token budget", "critic.ppo_max_token_len_per_gpu=true",
     "critic.ppo_max_token_len_per_gpu", "not a number"),
    ("a reference that balances", "ref.ppo_max_token_len_per_gpu=auto",
     "ref.ppo_max_token_len_per_gpu", "valid integer"),
    ("a number for a switch", "actor.use_kl_loss=7", "actor.use_kl_loss", "valid boolean"),
    ("a word for a switch", "actor.shuffle=perhaps", "actor.shuffle", "valid boolean"),
    ("a number for text", "model.path=3", "model.path", "valid string"),
    ("a list for text", "data.prompt_key=[a]", "data.prompt_key", "valid string"),
    ("a section for a value", "actor.optim.lr.x=1", "actor.optim.lr", "valid number"),
    ("a value for a section", "actor.optim=3", "actor.optim", "is a section, not a value"),
    ("null for a section", "data=null", "data", "is a section, not a value"),
    ("a number for a mapping", "data.task_kwargs=3", "data.task_kwargs", "key: value pairs"),
    ("one beta", "actor.optim.betas=[0.9]", "actor.optim.betas.1", "field required"),
    ("three betas", "actor.optim.betas=[0.9,0.9,0.9]", "actor.optim.betas", "at most 2"),
    ("a beta of one", "actor.optim.betas=[0.9,1.0]", "actor.optim.betas.1", "outside [0, 1)"),
    ("not a number", "actor.clip_ratio=.nan", "actor.clip_ratio", "finite"),
    ("infinity", "actor.optim.lr=.inf", "actor.optim.lr", "finite"),
    ("no such engine", "rollout.name=sg", "rollout.name", "choose one of: local, sglang"),
    ("verl's other engine", "rollout.name=vllm", "rollout.name", "set rollout.name: sglang"),
    ("no such dtype", "model.dtype=bf16", "model.dtype", "did you mean bfloat16?"),
    ("no such estimator", "algorithm.adv_estimator=gea", "algorithm.adv_estimator",
     "did you mean gae?"),
    ("no such loss", "actor.policy_loss.loss_mode=ppo", "actor.policy_loss.loss_mode", "vanilla"),
    ("no such aggregation", "actor.loss_agg_mode=token_mean", "actor.loss_agg_mode",
     "did you mean token-mean?"),
    ("no such KL", "algorithm.kl_penalty=k4", "algorithm.kl_penalty", "choose one of"),
    ("no such logger", "trainer.logger=[console, comet]", "trainer.logger.1", "tensorboard"),
    ("no such recompute", "actor.megatron.recompute_granularity=all",
     "actor.megatron.recompute_granularity", "selective"),
    ("no such truncation", "data.truncation=cut", "data.truncation", "error, left, right, middle"),
    ("an empty batch", "data.train_batch_size=0", "data.train_batch_size", "a value > 0"),
    ("a negative rate", "critic.optim.lr=-1e-5", "critic.optim.lr", "a value >= 0"),
    ("gamma above one", "algorithm.gamma=1.1", "algorithm.gamma", "a value <= 1"),
    ("top_p of nothing", "rollout.top_p=0", "rollout.top_p", "a value > 0"),
    ("top_k of nothing", "rollout.top_k=0", "rollout.top_k", "keeps no token"),
    ("top_k below -1", "rollout.top_k=-2", "rollout.top_k", "a value >= -1"),
    ("no samples", "rollout.n=0", "rollout.n", "a value > 0"),
    ("zero ranks", "actor.megatron.tensor_model_parallel_size=0",
     "actor.megatron.tensor_model_parallel_size", "a value > 0"),
    ("one virtual stage", "actor.megatron.virtual_pipeline_model_parallel_size=1",
     "actor.megatron.virtual_pipeline_model_parallel_size", "a value > 1"),
    ("greedy training", "rollout.temperature=0", "rollout.temperature", "greedy"),
    ("many greedy validation samples", "rollout.val_kwargs.n=4", "rollout.val_kwargs.n",
     "greedy samples"),
    ("batch not divisible", "actor.ppo_mini_batch_size=3", "actor.ppo_mini_batch_size",
     "choose one of 1, 2, 4, 8"),
    ("mini-batch above batch", "actor.ppo_mini_batch_size=16", "actor.ppo_mini_batch_size",
     "not a multiple"),
    ("critic batch not divisible", "critic.ppo_mini_batch_size=5", "critic.ppo_mini_batch_size",
     "not a multiple"),
    ("a group of one", "algorithm.adv_estimator=grpo", "rollout.n", "choose 2 or more"),
    ("a positions overflow", "data.max_response_length=4096", "data.max_response_length",
     "more than the model's 512 positions"),
    ("task and files", "data.train_files=[{file}]", "data.task", "train_files is given too"),
    ("no prompts at all", "data.task=null", "data.task", "no training prompts"),
    ("no such file", "data.val_files=[nowhere.jsonl]", "data.val_files", "no such file"),
    ("a folder for a file", "data.val_files=[{folder}]", "data.val_files", "is not a file"),
    ("an empty file", "data.val_files=[{empty}]", "data.val_files", "the file is empty"),
    ("an unknown kind of file", "data.val_files=[{text}]", "data.val_files", "unknown file type"),
    ("no such model", "model.path=nowhere/model", "model.path", "no such folder"),
    ("a name of the Hub", "model.path=Qwen/Qwen2.5-0.5B-Instruct", "model.path",
     "not downloaded by default fix: set model.hub: true, or run `hf download Qwen/"),
    ("a switch that is none", "model.hub=always", "model.hub", "false, true, modelscope"),
    ("a file for a model", "model.path={file}", "model.path", "is a file, not a folder"),
    ("a folder without config.json", "model.path={folder}", "model.path", "no config.json"),
    ("a model without weights", "model.path={bare}", "model.path", "has no *.safetensors"),
    ("no such embedded model", "model.path=builtin:tny", "model.path", "no such embedded model"),
    ("an unknown family", "model.path={alien}", "model.path", "is not supported"),
    ("a checkpoint that would run code", "model.path={unsafe}", "model.path",
     "metadata: it names posix.mkdir"),
    ("a critic that would run code", "critic.path={unsafe}", "critic.path", "it names posix.mkdir"),
    ("no such critic", "critic.path=nowhere/critic", "critic.path", "no such folder"),
    ("no such embedded critic", "critic.path=builtin:tny", "critic.path",
     "no such embedded model"),
    ("no such embedded reference", "algorithm.use_kl_in_reward=true ref.path=builtin:nowhere",
     "ref.path", "no such embedded model"),
    ("a reference of an unknown family", "algorithm.use_kl_in_reward=true ref.path={alien}",
     "ref.path", "is not supported"),
    ("a reference nobody asks", "ref.path=builtin:tiny", "ref.path", "no KL term is on"),
    ("adaptive KL without KL", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.type",
     "no effect"),
    ("decay upward", "actor.optim.min_lr=1", "actor.optim.min_lr", "is above actor.optim.lr"),
    ("a scale nobody uses", "actor.loss_scale_factor=10", "actor.loss_scale_factor", "no effect"),
    ("a tolerance nobody uses", "rollout.logprob_tolerance=0.1", "rollout.logprob_tolerance",
     "no effect"),
    ("a correction bound nobody uses", "algorithm.rollout_correction.rollout_is_lower=0.5",
     "algorithm.rollout_correction.rollout_is_lower", "no effect"),
    ("a remote reward without address", "reward.name=remote", "reward.url", "needs it"),
    ("a reward function without name", "reward.name=function", "reward.function", "needs it"),
    ("an unknown way out of errors", "reward.on_error=skip", "reward.on_error", "one of: stop"),
    ("a score that is not finite", "reward.on_error=.nan", "reward.on_error", "finite"),
    ("processes without a function", "reward.processes=2", "reward.processes", "no effect"),
    ("no process for a function", "reward.processes=0", "reward.processes", "a value >= 1"),
    ("batches without a function", "reward.batch_size=8", "reward.batch_size", "no effect"),
    ("no memory for a function", "reward.memory_mb=0", "reward.memory_mb", "a value > 0"),
    (
        "a limit for a server's memory",
        "reward.name=remote reward.url=http://h/x reward.memory_mb=9",
        "reward.memory_mb",
        "no effect",
    ),
    ("a function nobody calls", "reward.function=a.b:c", "reward.function", "no effect"),
    ("a score replaced and lowered", "reward.missing_eos_score=-1 reward.missing_eos_penalty=1",
     "reward.missing_eos_penalty", "replaces the score"),
    ("an overlong buffer above the limit", "reward.overlong_buffer_len=100",
     "reward.overlong_buffer_len", "longer than data.max_response_length"),
    ("a local engine over ranks", "rollout.tensor_model_parallel_size=2",
     "rollout.tensor_model_parallel_size", "no effect with rollout.name = local"),
    ("a local engine that aborts", "rollout.over_sampling=0.2", "rollout.over_sampling",
     "no effect"),
    ("partial responses without aborts", "rollout.partial_rollout=true",
     "rollout.partial_rollout", "no response is aborted"),
    ("server addresses for a local engine", "rollout.urls=[http://a]", "rollout.urls", "no effect"),
    ("a validation of nothing", "trainer.test_freq=5 data.val_size=0", "data.val_size",
     "needs validation prompts"),
    ("a run folder that is a file", "trainer.default_local_dir={file}",
     "trainer.default_local_dir", "is a file"),
    ("more ranks than started", "trainer.nnodes=2 trainer.n_gpus_per_node=8",
     "trainer.n_gpus_per_node", "but 1 ranks were started"),
    ("a checkpoint nobody loads", "trainer.resume_from_path=runs/x", "trainer.resume_from_path",
     "no effect with trainer.resume_mode = auto"),
    ("a resume without checkpoint", "trainer.resume_mode=resume_path", "trainer.resume_from_path",
     "needs it"),
    ("no such way with an earlier run", "trainer.on_existing_run=overwrite",
     "trainer.on_existing_run", "choose one of: refuse, set_aside"),
    ("a best of nothing", "trainer.best_metric=lr", "trainer.best_metric", "save_freq"),
    ("a deadline that is no time", "trainer.checkpoint_must_save_by=soon",
     "trainer.checkpoint_must_save_by", "should match pattern"),
    ("a local engine ahead", "trainer.rollout_ahead=1 "
     "algorithm.rollout_correction.rollout_is=token", "trainer.rollout_ahead",
     "only make samples older"),
    ("a sleeping server ahead", "trainer.rollout_ahead=1 rollout.name=sglang "
     "algorithm.rollout_correction.rollout_is=token", "trainer.rollout_ahead", "sleep while"),
    ("two steps ahead", "trainer.rollout_ahead=2", "trainer.rollout_ahead", "a value <= 1"),
    ("older samples taken for new", "trainer.rollout_ahead=1 rollout.name=sglang "
     "rollout.urls=[http://a:1]", "algorithm.rollout_correction.rollout_is", "the last update"),
    ("a server apart without address", "rollout.name=sglang rollout.mode=disaggregated",
     "rollout.urls", "addresses of running servers"),
    ("pieces for a local engine", "rollout.sync_mode=sliced", "rollout.sync_mode", "no effect"),
    ("pieces by disk", "rollout.name=sglang rollout.sync_mode=delta rollout.sync=disk",
     "rollout.sync_mode", "does not work with rollout.sync = disk"),
    ("pieces for servers of others", "rollout.name=sglang rollout.mode=disaggregated "
     "rollout.urls=[http://a] rollout.sync_mode=sliced", "rollout.sync_mode", "starts itself"),
    ("pieces of layers laid out otherwise", "rollout.name=sglang rollout.sync_mode=sliced "
     'rollout.server_args={{"pp_size":2}}', "rollout.sync_mode", "server_args.pp_size"),
    ("a port of the user's own", 'rollout.name=sglang rollout.server_args={{"--port":3}}',
     "rollout.server_args.port", "is set by mppo"),
    ("experts' groups by SGLang's name", 'rollout.name=sglang rollout.server_args={{"ep-size":2}}',
     "rollout.server_args.ep_size", "set rollout.expert_parallel_size"),
    ("another model for the servers",
     'rollout.name=sglang rollout.server_args={{"json-model-override-args":"x"}}',
     "rollout.server_args.json_model_override_args", "edit config.json in model.path"),
    ("experts' groups for a local engine", "rollout.expert_parallel_size=2",
     "rollout.expert_parallel_size", "no effect with rollout.name = local"),
    ("an address that is none", "rollout.name=sglang rollout.mode=disaggregated rollout.urls=[h:1]",
     "rollout.urls", "is not the URL of an HTTP server"),
]  # fmt: skip

# layouts on four ranks: name, overrides, key, message
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
OVERRIDE = "actor.megatron.override_transformer_config"
LAYOUTS = [
    ("world not a multiple", f"actor.megatron.{TP}=4 actor.megatron.{PP}=2", "actor.megatron",
     "start a multiple of 8 ranks"),
    ("critic's world not a multiple", f"critic.megatron.{PP}=2 critic.megatron.{TP}=4",
     "critic.megatron", "world size 4 is not a multiple"),
    ("heads not divisible", "model.path={nine_heads} actor.megatron.tensor_model_parallel_size=2",
     f"actor.megatron.{TP}", "does not divide the 9 attention heads"),
    ("layers not divisible", f"model.path={{three_layers}} actor.megatron.{PP}=2",
     f"actor.megatron.{PP}", "3 layers do not divide evenly among 2 stages"),
    ("a reference's heads not divisible", "algorithm.use_kl_in_reward=true ref.path={nine_heads} "
     f"ref.megatron.{TP}=2", f"ref.megatron.{TP}",
     "does not divide the 9 attention heads (ref.path)"),
    ("a reference's layers not divisible", "algorithm.use_kl_in_reward=true "
     f"ref.path={{three_layers}} ref.megatron.{PP}=2", f"ref.megatron.{PP}",
     "3 layers do not divide evenly among 2 stages (ref.path)"),
    ("a reference's width not divisible", "algorithm.use_kl_in_reward=true ref.path={odd_width} "
     f"ref.megatron.{TP}=2", f"ref.megatron.{TP}",
     "does not divide the feed-forward width 37 (ref.path)"),
    ("a reference that the actor's layout does not fit", "algorithm.use_kl_in_reward=true "
     f"ref.path={{three_layers}} actor.megatron.{PP}=2", f"actor.megatron.{PP}",
     "or give ref.megatron a layout of its own"),
    ("a field Megatron does not have", f"{OVERRIDE}.recompute_module=[mlp]",
     f"{OVERRIDE}.recompute_module", "did you mean recompute_modules?"),
    ("a field of MLA in another model", f"{OVERRIDE}.kv_lora_rank=8",
     f"{OVERRIDE}.kv_lora_rank", "has no such field"),
    ("dropout", f"{OVERRIDE}.attention_dropout=0.1", f"{OVERRIDE}.attention_dropout",
     "changes the log-probabilities of the same weights"),
    ("a loss divided twice", f"{OVERRIDE}.calculate_per_token_loss=false",
     f"{OVERRIDE}.calculate_per_token_loss", "already carry the normaliser of the global batch"),
    ("a size beside the recipe's", f"{OVERRIDE}.{TP}=2", f"{OVERRIDE}.{TP}",
     f"set actor.megatron.{TP}"),
    ("a dtype beside the recipe's", f"{OVERRIDE}.bf16=true", f"{OVERRIDE}.bf16", "set model.dtype"),
    ("another model by its fields", f"{OVERRIDE}.layernorm_epsilon=0.1",
     f"{OVERRIDE}.layernorm_epsilon", "is part of the model"),
    ("a router recomputed apart", "model.path=builtin:tiny-moe "
     "algorithm.adv_estimator=reinforce_plus_plus actor.megatron.recompute_granularity=selective "
     f"{OVERRIDE}.recompute_modules=[moe]", f"{OVERRIDE}.recompute_modules",
     "recomputes the router apart"),
    ("a reference's field Megatron does not have", "algorithm.use_kl_in_reward=true "
     'ref.megatron={{"override_transformer_config":{{"nonsense":1}}}}',
     "ref.megatron.override_transformer_config.nonsense", "has no such field"),
    ("experts' world not a multiple", "model.path={six_experts} "
     "algorithm.adv_estimator=reinforce_plus_plus actor.megatron.expert_tensor_parallel_size=2 "
     "actor.megatron.expert_model_parallel_size=3", "actor.megatron",
     "start a multiple of 6 ranks"),
    ("chunks not divisible",
     f"actor.megatron.{PP}=2 actor.megatron.virtual_pipeline_model_parallel_size=3",
     "actor.megatron.virtual_pipeline_model_parallel_size", "do not divide into 3 chunks"),
    ("weights gathered that no rank divides", "actor.megatron.use_distributed_optimizer=false "
     "actor.megatron.overlap_param_gather=true", "actor.megatron.overlap_param_gather",
     "without use_distributed_optimizer"),
    ("chunks without a pipeline", "actor.megatron.virtual_pipeline_model_parallel_size=2",
     "actor.megatron.virtual_pipeline_model_parallel_size", "has no effect"),
    ("a last stage without a pipeline", "critic.megatron.num_layers_in_last_pipeline_stage=1",
     "critic.megatron.num_layers_in_last_pipeline_stage", "has no effect"),
    ("a first stage too large",
     f"actor.megatron.{PP}=2 actor.megatron.num_layers_in_first_pipeline_stage=9",
     f"actor.megatron.{PP}", "leave -5 of 4 layers"),
    ("experts in a dense model", "actor.megatron.expert_model_parallel_size=2",
     "actor.megatron.expert_model_parallel_size", "not a mixture of experts"),
    ("experts not divisible", "model.path={six_experts} "
     "algorithm.adv_estimator=reinforce_plus_plus actor.megatron.expert_model_parallel_size=4",
     "actor.megatron.expert_model_parallel_size", "does not divide the 6 experts"),
    ("a mixture under TP alone",
     "model.path=builtin:tiny-moe algorithm.adv_estimator=reinforce_plus_plus "
     f"actor.megatron.{TP}=2 actor.megatron.sequence_parallel=false",
     "actor.megatron.sequence_parallel", "needs sequence parallelism"),
    ("an auxiliary loss that is off", "actor.megatron.moe_aux_loss_coeff=0.1",
     "actor.megatron.moe_aux_loss_coeff", "no effect"),
    ("a frozen router that moves", "model.path=builtin:tiny-moonlight "
     "algorithm.adv_estimator=reinforce_plus_plus actor.megatron.freeze_moe_router=true "
     "actor.megatron.moe_router_bias_update_rate=0.001",
     "actor.megatron.moe_router_bias_update_rate", "changes the router's bias"),
    ("stages for another model", f"actor.megatron.{PP}=2 actor.megatron.pipeline_layers=[1,9]",
     "actor.megatron.pipeline_layers", "adds up to 10"),
    ("a ring of one rank", "actor.megatron.cp_comm_type=p2p", "actor.megatron.cp_comm_type",
     "no effect"),
    ("no such exchange", "actor.megatron.cp_comm_type=a2a", "actor.megatron.cp_comm_type",
     "all_gather, p2p"),
    ("stages without a pipeline", "actor.megatron.pipeline_layers=[4]",
     "actor.megatron.pipeline_layers", "no effect"),
    ("too few stages", f"actor.megatron.{PP}=4 actor.megatron.pipeline_layers=[2,2]",
     "actor.megatron.pipeline_layers", "PP x VPP = 4 chunks"),
    ("stages stated twice", f"actor.megatron.{PP}=2 actor.megatron.pipeline_layers=[1,3] "
     "actor.megatron.num_layers_in_last_pipeline_stage=3",
     "actor.megatron.pipeline_layers", "is set too"),
    ("replay without experts", "actor.router_replay=R2", "actor.router_replay",
     "not a mixture of experts"),
    ("replay from an engine that cannot", "model.path=builtin:tiny-moe "
     "algorithm.adv_estimator=reinforce_plus_plus actor.router_replay=R3",
     "actor.router_replay", "does not return the experts"),
    ("a critic that replays the engine", "critic.router_replay=R3", "critic.router_replay",
     "off, R2"),
    ("a bias that is not there", "model.path=builtin:tiny-moe "
     "algorithm.adv_estimator=reinforce_plus_plus actor.megatron.moe_router_bias_update_rate=0.001",
     "actor.megatron.moe_router_bias_update_rate", "no expert bias"),
    ("a router without experts", "actor.megatron.moe_router_dtype=fp64",
     "actor.megatron.moe_router_dtype", "not a mixture of experts"),
    ("a router in half precision", "actor.megatron.moe_router_dtype=bf16",
     "actor.megatron.moe_router_dtype", "fp32, fp64"),
    ("a capacity of nothing", "actor.megatron.moe_expert_capacity_factor=0",
     "actor.megatron.moe_expert_capacity_factor", "a value > 0"),
    ("choices replayed and dropped", "model.path=builtin:tiny-moe "
     "algorithm.adv_estimator=reinforce_plus_plus actor.router_replay=R2 "
     "actor.megatron.moe_expert_capacity_factor=1.25",
     "actor.megatron.moe_expert_capacity_factor", "actor.router_replay = R2 must repeat"),
    ("a dispatcher across data parallelism", "model.path=builtin:tiny-moe "
     "algorithm.adv_estimator=reinforce_plus_plus actor.megatron.expert_model_parallel_size=2 "
     "actor.megatron.moe_token_dispatcher_type=allgather",
     "actor.megatron.moe_token_dispatcher_type", "from 2 ranks (ETP x EP)"),
    ("a dispatcher that cannot", "model.path=builtin:tiny-moe "
     f"algorithm.adv_estimator=reinforce_plus_plus actor.megatron.{PP}=2 "
     "actor.megatron.moe_token_dispatcher_type=allgather",
     "actor.megatron.moe_token_dispatcher_type", "need alltoall"),
    ("fewer sequences than ranks", "actor.ppo_mini_batch_size=2 critic.ppo_mini_batch_size=4",
     "actor.ppo_mini_batch_size", "fewer than the 4 data-parallel ranks"),
    ("dense layers SGLang does not know", "rollout.name=sglang model.path={mixed_layers} "
     "algorithm.adv_estimator=reinforce_plus_plus", "rollout.name", "1 of 4 are dense"),
    ("an engine that does not fit", "rollout.name=sglang rollout.tensor_model_parallel_size=3 "
     "model.path={nine_heads}", "rollout.tensor_model_parallel_size", "divide the 4 ranks"),
    ("a server on two nodes", "rollout.name=sglang rollout.tensor_model_parallel_size=4 "
     "trainer.nnodes=2 trainer.n_gpus_per_node=2", "rollout.tensor_model_parallel_size",
     "would be on several nodes, which have 2 ranks each"),
    ("an engine's groups of unequal size", "rollout.name=sglang model.path={six_experts} "
     "algorithm.adv_estimator=reinforce_plus_plus rollout.tensor_model_parallel_size=4 "
     "rollout.expert_parallel_size=3", "rollout.expert_parallel_size",
     "divide the 4 ranks of a server"),
    ("an engine's experts unequally shared", "rollout.name=sglang model.path={six_experts} "
     "algorithm.adv_estimator=reinforce_plus_plus rollout.tensor_model_parallel_size=4 "
     "rollout.expert_parallel_size=4", "rollout.expert_parallel_size", "divide the 6 experts"),
    ("an engine's experts in a dense model", "rollout.name=sglang "
     "rollout.tensor_model_parallel_size=2 rollout.expert_parallel_size=2",
     "rollout.expert_parallel_size", "the model has no experts"),
]  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("places"))


@pytest.mark.parametrize(("text", "key", "expected"), [row[1:] for row in DOCUMENTS],
                         ids=[row[0] for row in DOCUMENTS])  # fmt: skip
def test_a_malformed_recipe_file_is_one_issue(text, key, expected, tmp_path, capsys):
    assert_one_fault(refusal(tmp_path, capsys, text, ""), key, expected)


@pytest.mark.parametrize(("setting", "key", "expected"), [row[1:] for row in SETTINGS],
                         ids=[row[0] for row in SETTINGS])  # fmt: skip
def test_a_malformed_setting_is_one_issue(
    setting, key, expected, tmp_path, capsys, places, monkeypatch
):
    if "{" in setting:
        setting = setting.format(**places)
    settings = " ".join(part.replace(" ", "") for part in re.split(r" (?=\w+\.)", setting))
    monkeypatch.chdir(tmp_path)
    assert_one_fault(refusal(tmp_path, capsys, GOOD, settings), key, expected)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"], "nothing was run"


@pytest.mark.parametrize(("settings", "key", "expected"), [row[1:] for row in LAYOUTS],
                         ids=[row[0] for row in LAYOUTS])  # fmt: skip
def test_a_layout_that_does_not_fit_is_one_issue(settings, key, expected, tmp_path, capsys, places):
    options = ("--dry-run", "--world-size", "4")
    message = refusal(tmp_path, capsys, GOOD, settings.format(**places), *options)
    assert_one_fault(message, key, expected)


def test_the_good_recipe_has_no_issue(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD)
    assert load_checked(path, [], 1).trainer.experiment_name == "spoilt"


def test_a_missing_recipe_is_reported(tmp_path, capsys):
    assert main(["--config", str(tmp_path / "nowhere.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_all_issues_are_reported_together(tmp_path, capsys):
    settings = "actor.ppo_mini_batch_size=3 rollout.temperature=0 actor.lr=1 data.seed=x"
    message = refusal(tmp_path, capsys, GOOD, settings)
    assert ": 4 issues" in message
