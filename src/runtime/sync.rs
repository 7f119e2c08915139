//! Locks whose guarded state every holder leaves complete, so that a panic of one holder does not affect the others; and heartbeats of
//! loops, and panics as results.

pub mod heartbeat;
pub mod panics;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, poisoned or not.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_poisoned_mutex_can_still_be_locked() {
        let mutex = Mutex::new(1);
        std::thread::scope(|scope| {
            let poisoner = scope.spawn(|| {
                let _guard = mutex.lock();
                panic!("poisons the mutex");
            });
            poisoner.join().unwrap_err();
        });
        assert!(mutex.is_poisoned());
        assert_eq!(*lock(&mutex), 1);
    }
}
