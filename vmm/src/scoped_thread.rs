// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A thread beside its owner: it waits for something of its own and for an event that says that the
//! owner is gone, and has ended when the owner's drop returns.

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
    sync::Arc,
    thread,
};

use vmm_sys_util::eventfd::EventFd;

/// The owner's end. Dropping it ends the thread.
#[derive(Debug)]
pub struct ScopedThread {
    over: Arc<EventFd>,
    thread: Option<thread::JoinHandle<()>>,
}

impl ScopedThread {
    /// Starts a thread of this name. It gets the event that it is to end at.
    ///
    /// # Errors
    /// No event or no thread can be had.
    pub fn start(name: &str, work: impl FnOnce(&EventFd) + Send + 'static) -> io::Result<Self> {
        let over = Arc::new(EventFd::new(libc::EFD_NONBLOCK)?);
        let told = Arc::clone(&over);
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || work(&told))?;
        Ok(Self {
            over,
            thread: Some(thread),
        })
    }
}

impl Drop for ScopedThread {
    fn drop(&mut self) {
        let told = self.over.write(1).is_ok();
        if let (true, Some(thread)) = (told, self.thread.take()) {
            // A thread that panicked has said so itself.
            let _ = thread.join();
        }
    }
}

/// An event as something to wait for.
pub fn borrow_event(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the borrow lives no longer than the event.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}
