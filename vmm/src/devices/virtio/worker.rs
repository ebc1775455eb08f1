// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Worker: the thread that owns a device from `DRIVER_OK` to its reset.

use std::{
    io,
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
};

use rustix::event::{PollFd, PollFlags, poll};
use vmm_sys_util::eventfd::EventFd;

use super::{DeviceError, Interrupt, Queue, Queues, RateLimitedLog, VirtioDevice};
use crate::{affinity::unpin_thread, scoped_thread::borrow_event};

/// Device with its name and log, which the worker thread owns while it runs.
pub struct WorkerContext {
    pub name: String,
    pub device: Box<dyn VirtioDevice>,
    pub log: RateLimitedLog,
}

pub struct Worker {
    /// Wakes the thread from its poll.
    stop_event: EventFd,
    /// Stops the thread between two requests.
    stop_flag: Arc<AtomicBool>,
    thread: JoinHandle<Option<StoppedWorker>>,
}

/// Device and queues of a worker that was stopped.
pub struct StoppedWorker {
    pub context: WorkerContext,
    pub queues: Vec<Option<Queue>>,
}

impl Worker {
    /// Starts the thread of a device.
    ///
    /// # Errors
    /// The host has no further thread or file; the device is returned.
    pub fn start(
        context: WorkerContext,
        mut queues: Vec<Option<Queue>>,
        interrupt: Arc<Interrupt>,
    ) -> Result<Self, (io::Error, WorkerContext)> {
        let stop_flag = Arc::default();
        for queue in queues.iter_mut().flatten() {
            queue.stop_flag = Arc::clone(&stop_flag);
        }
        // The thread gets the device when it runs: one that does not start would drop it.
        let (device, own) = mpsc::sync_channel(1);
        let spawn = || -> io::Result<_> {
            let stop_event = EventFd::new(libc::EFD_NONBLOCK)?;
            let event = stop_event.try_clone()?;
            let name = context.name.clone();
            let thread = thread::Builder::new().name(name).spawn(move || {
                let (context, queues): (WorkerContext, _) = own.recv().ok()?;
                // The vCPU that activates the device starts the thread, and may be pinned.
                if let Err(error) = unpin_thread() {
                    log::warn!("{} runs on the CPU of a vCPU: {error}", context.name);
                }
                Some(run(context, queues, &interrupt, &event))
            })?;
            Ok((stop_event, thread))
        };
        match spawn() {
            Ok((stop_event, thread)) => {
                // The thread receives once.
                let _ = device.send((context, queues));
                Ok(Self { stop_event, stop_flag, thread })
            }
            Err(error) => Err((error, context)),
        }
    }

    /// Stops the thread after the current request. Returns `None` if the thread panicked.
    pub fn stop(self) -> Option<StoppedWorker> {
        self.stop_flag.store(true, Ordering::Relaxed);
        self.stop_event.write(1).ok()?;
        self.thread.join().ok().flatten()
    }
}

fn run(
    mut context: WorkerContext,
    mut queues: Vec<Option<Queue>>,
    interrupt: &Interrupt,
    stop: &EventFd,
) -> StoppedWorker {
    if let Err(error) = serve(context.device.as_mut(), &mut queues, stop) {
        let WorkerContext { name, log, .. } = &mut context;
        log.warn(format_args!("{name} stopped until the guest resets it: {error}"));
        interrupt.set_needs_reset();
        let _ = wait_readable(&[stop], Vec::new());
    }
    StoppedWorker { context, queues }
}

fn serve(
    device: &mut dyn VirtioDevice,
    queues: &mut Queues,
    stop: &EventFd,
) -> Result<(), DeviceError> {
    let notifications = queues.iter().enumerate();
    let notifications: Vec<(usize, Arc<EventFd>)> = notifications
        .filter_map(|(index, queue)| Some((index, Arc::clone(&queue.as_ref()?.kick_event))))
        .collect();
    let mut events = vec![stop];
    events.extend(notifications.iter().map(|(_, event)| event.as_ref()));
    loop {
        let ready = wait_readable(&events, device.backend_fds())
            .map_err(DeviceError::host_call("waiting for the guest (poll)"))?;
        let (ready, backend_ready) = ready.split_at(events.len());
        if ready[0] {
            return Ok(());
        }
        for ((index, event), _) in notifications.iter().zip(&ready[1..]).filter(|(_, is)| **is) {
            let _ = event.read();
            if let Some(queue) = &mut queues[*index] {
                device.process_queue(*index, queue)?;
            }
        }
        if backend_ready.contains(&true) {
            device.process_backend(queues)?;
        }
    }
}

/// Waits until a descriptor is readable. Returns the state of each: first `events`, then `backend`.
fn wait_readable(events: &[&EventFd], backend: Vec<BorrowedFd<'_>>) -> io::Result<Vec<bool>> {
    let fds = events.iter().map(|event| borrow_event(event)).chain(backend);
    let mut fds: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    rustix::io::retry_on_intr(|| poll(&mut fds, None))?;
    Ok(fds.iter().map(|fd| !fd.revents().is_empty()).collect())
}
