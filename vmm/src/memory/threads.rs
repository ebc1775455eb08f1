// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Work of several threads on memory.

use std::{io, thread};

/// Calls `work` with each item in a thread, with the first one in this thread, as with those for which the
/// host starts no thread. Returns the results in the order of the items.
///
/// # Errors
/// The first error of `work`, when all threads have ended.
pub(super) fn in_threads<T: Clone + Send, R: Send>(
    items: impl IntoIterator<Item = T>,
    work: impl Fn(T) -> io::Result<R> + Sync,
) -> io::Result<Vec<R>> {
    let work = &work;
    thread::scope(|scope| {
        let mut items = items.into_iter();
        let first = items.next();
        let start = |item: T| {
            let of_thread = item.clone();
            thread::Builder::new().spawn_scoped(scope, move || work(of_thread)).map_err(|_| item)
        };
        let started: Vec<_> = items.map(start).collect();
        let mut results: Vec<_> = first.map(work).into_iter().collect();
        for started in started {
            let panicked = |_| Err(io::Error::other("a thread panicked"));
            results.push(match started {
                Ok(thread) => thread.join().unwrap_or_else(panicked),
                Err(item) => work(item),
            });
        }
        results.into_iter().collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_the_order_of_the_items_and_the_first_error_is_returned() {
        let double = |item: u32| match item {
            0..8 => Ok(2 * item),
            _ => Err(io::Error::other(format!("{item} is too large"))),
        };

        assert_eq!(in_threads(3..6, double).unwrap(), [6, 8, 10]);
        assert!(in_threads(0..0, double).unwrap().is_empty());
        assert_eq!(in_threads(6..10, double).unwrap_err().to_string(), "8 is too large");
    }
}
