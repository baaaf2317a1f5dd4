"""Layouts that do not fit four ranks or the model."""

from __future__ import annotations

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
OVERRIDE = "actor.megatron.override_transformer_config"
REWARDED = "reward_model.path=builtin:tiny-reward"

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
     'ref.megatron={"override_transformer_config":{"nonsense":1}}',
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
    ("a reward model's world not a multiple", f"{REWARDED} reward_model.megatron.{PP}=2 "
     f"reward_model.megatron.{TP}=4", "reward_model.megatron", "world size 4 is not a multiple"),
    ("a reward model's heads not divisible", "reward_model.path={nine_heads} "
     f"reward_model.megatron.{TP}=2", f"reward_model.megatron.{TP}",
     "does not divide the 9 attention heads (reward_model.path)"),
    ("a reward model's layers not divisible", "reward_model.path={three_layers} "
     f"reward_model.megatron.{PP}=2", f"reward_model.megatron.{PP}",
     "3 layers do not divide evenly among 2 stages (reward_model.path)"),
]  # fmt: skip
