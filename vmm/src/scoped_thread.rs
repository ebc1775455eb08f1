// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A thread that stops when its owner is dropped. The thread waits for work and for a stop event.
//! Dropping the owner signals the event and joins the thread.

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread,
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmm_sys_util::eventfd::EventFd;

/// The owner of a scoped thread.
#[derive(Debug)]
pub struct ScopedThread {
    stop: Arc<EventFd>,
    thread: Option<thread::JoinHandle<()>>,
}

impl ScopedThread {
    /// Starts a thread that calls `work` with the stop event.
    ///
    /// # Errors
    /// The event or the thread cannot be created.
    pub fn start(name: &str, work: impl FnOnce(&EventFd) + Send + 'static) -> io::Result<Self> {
        let stop = Arc::new(EventFd::new(libc::EFD_NONBLOCK)?);
        let event = Arc::clone(&stop);
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || work(&event))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for ScopedThread {
    fn drop(&mut self) {
        let signalled = self.stop.write(1).is_ok();
        if let (true, Some(thread)) = (signalled, self.thread.take()) {
            // The panic hook has reported a panic of the thread.
            let _ = thread.join();
        }
    }
}

/// Calls the work of a thread whose result others wait for. A panic, which the panic hook has reported, is
/// an error.
///
/// # Errors
/// Those of the work.
pub fn catch_panic<T>(work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(io::Error::other("a defect")))
}

/// Borrows the file descriptor of an event.
pub fn borrow_event(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the result borrows the event, which keeps the file descriptor open.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

/// Returns whether a thread is to stop. Unlike a read of the event, this can be asked again.
pub fn is_stop_requested(stop: &EventFd) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(borrow_event(stop), PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::io::retry_on_intr(|| poll(&mut fds, Some(&now))).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_can_be_asked_for_again() {
        let stop = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        assert!(!is_stop_requested(&stop));

        stop.write(1).unwrap();

        assert_eq!([(); 2].map(|()| is_stop_requested(&stop)), [true; 2]);
    }

    #[test]
    fn a_panic_of_the_work_is_an_error() {
        let error = catch_panic::<()>(|| panic!("reported by the hook")).unwrap_err();

        assert_eq!(error.to_string(), "a defect");
        assert_eq!(catch_panic(|| Ok(7)).unwrap(), 7);
    }
}
