//! Named cases of the scheduler: what broke others, and what broke here.

#[path = "scheduler_cases/admission.rs"]
mod admission;
#[path = "scheduler_cases/budget.rs"]
mod budget;
#[path = "scheduler_cases/cache.rs"]
mod cache;
#[path = "scheduler_cases/cancel.rs"]
mod cancel;
#[path = "scheduler_cases/choices.rs"]
mod choices;
#[path = "scheduler_cases/drafts.rs"]
mod drafts;
#[path = "scheduler_cases/failure.rs"]
mod failure;
#[path = "scheduler_cases/lookup.rs"]
mod lookup;
#[path = "scheduler_cases/overlap.rs"]
mod overlap;
#[path = "scheduler_cases/pause.rs"]
mod pause;
#[path = "scheduler_cases/preemption.rs"]
mod preemption;
#[path = "scheduler_cases/priority.rs"]
mod priority;
#[path = "scheduler_cases/prompt_logprobs.rs"]
mod prompt_logprobs;
#[path = "scheduler_cases/statistics.rs"]
mod statistics;
#[path = "scheduler_cases/tenants.rs"]
mod tenants;
#[path = "scheduler_cases/world.rs"]
mod world;
