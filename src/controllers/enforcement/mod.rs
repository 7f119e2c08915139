//! TODO-DOC controllers::enforcement

pub mod extender_view;
pub mod nominations;
pub mod planned_taint;
