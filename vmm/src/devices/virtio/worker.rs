// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The thread that a device works in, from the driver's `DRIVER_OK` to its reset.

use std::{
    io,
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use rustix::event::{PollFd, PollFlags, poll};
use vmm_sys_util::eventfd::EventFd;

use super::{DeviceError, Interrupt, Queues, RateLimitedLog, VirtioDevice};
use crate::scoped_thread::borrow_event;

/// A device, its name and its warnings: what goes into the thread and comes back.
pub struct WorkerContext {
    pub name: String,
    pub device: Box<dyn VirtioDevice>,
    pub complaints: RateLimitedLog,
}

/// A running thread.
#[derive(Debug)]
pub struct Worker {
    stop: EventFd,
    /// The same for a thread that is at work.
    stopping: Arc<AtomicBool>,
    thread: JoinHandle<WorkerContext>,
}

impl std::fmt::Debug for WorkerContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkerContext")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Worker {
    pub fn start(
        crew: WorkerContext,
        mut queues: Queues,
        interrupt: Arc<Interrupt>,
    ) -> io::Result<Self> {
        let stopping = Arc::default();
        queues.heed(&stopping);
        let stop = EventFd::new(libc::EFD_NONBLOCK)?;
        let stopped = stop.try_clone()?;
        let thread = thread::Builder::new()
            .name(crew.name.clone())
            .spawn(move || work(crew, queues, &interrupt, &stopped))?;
        Ok(Self {
            stop,
            stopping,
            thread,
        })
    }

    /// Waits until the device has finished the request it is at. `None` if its thread died.
    pub fn stop(self) -> Option<WorkerContext> {
        self.stopping.store(true, Ordering::Relaxed);
        self.stop.write(1).ok()?;
        self.thread.join().ok()
    }
}

fn work(
    mut crew: WorkerContext,
    mut queues: Queues,
    interrupt: &Interrupt,
    stop: &EventFd,
) -> WorkerContext {
    if let Err(error) = serve(crew.device.as_mut(), &mut queues, stop) {
        let WorkerContext {
            name, complaints, ..
        } = &mut crew;
        complaints.warn(format_args!(
            "{name} stopped until the guest resets it: {error}"
        ));
        interrupt.needs_reset();
        let _ = wait(&[stop], None);
    }
    crew.device.reset();
    crew
}

fn serve(
    device: &mut dyn VirtioDevice,
    queues: &mut Queues,
    stop: &EventFd,
) -> Result<(), DeviceError> {
    let kicks: Vec<(usize, Arc<EventFd>)> = queues
        .iter()
        .map(|(index, ring)| (index, Arc::clone(&ring.kick)))
        .collect();
    let mut events = vec![stop];
    events.extend(kicks.iter().map(|(_, kick)| kick.as_ref()));
    loop {
        let ready = wait(&events, device.backend_fd()).map_err(|source| DeviceError::Host {
            doing: "waiting for the guest (poll)",
            source,
        })?;
        if ready.first() == Some(&true) {
            return Ok(());
        }
        for ((index, kick), _) in kicks.iter().zip(&ready[1..]).filter(|(_, ready)| **ready) {
            // Empty when another reader was faster; there is none.
            let _ = kick.read();
            device.process_queue(*index, queues)?;
        }
        if ready.last() == Some(&true) {
            device.process_backend(queues)?;
        }
    }
}

/// Waits until one of them can be read, and says which: one answer for each event and a last one
/// for the input.
fn wait(events: &[&EventFd], input: Option<BorrowedFd<'_>>) -> io::Result<Vec<bool>> {
    let mut fds: Vec<PollFd<'_>> = events
        .iter()
        .map(|event| PollFd::from_borrowed_fd(borrow_event(event), PollFlags::IN))
        .collect();
    fds.extend(input.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
    loop {
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => break,
        }
    }
    let mut ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
    ready.resize(events.len() + 1, false);
    Ok(ready)
}
