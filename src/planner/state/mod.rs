//! The data that the stages of the solver share: the problem instance, the plan state with remaining demand, purchased nodes and
//! NodePool budgets, and the feedback from one solve to the next. No stage of the solver may be called from here.

pub mod demand;
pub mod feedback;
pub mod plan_state;
pub mod pool_budget;
pub mod solver_instance;
