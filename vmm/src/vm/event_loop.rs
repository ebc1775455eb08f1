// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Event loop of the main thread.

use std::{
    io,
    os::fd::AsFd as _,
    sync::mpsc,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    time::Timespec,
};
use vmm_sys_util::eventfd::EventFd;

use super::{
    api::ApiServer,
    boot_stats::{FIRST_MINUTE, MAX_MARKS},
    control::VmController,
    outcome::VmOutcome,
    signals::{SignalRequest, Signals},
    terminal::Terminal,
};
use crate::{devices::BootTimer, scoped_thread::borrow_event};

/// The event sources of the main thread.
pub(super) struct EventLoop<'a> {
    pub(super) signals: &'a Signals,
    /// Event signalled for boot timer marks and for the guest's exit.
    pub(super) wake_event: &'a EventFd,
    /// Event that the escape key signals.
    pub(super) quit_event: &'a EventFd,
    pub(super) marks: &'a mpsc::Receiver<(u8, Duration)>,
    pub(super) start_time: Instant,
    pub(super) terminal: Option<&'a Terminal>,
    pub(super) api: Option<&'a ApiServer>,
}

impl EventLoop<'_> {
    /// Handles events until the guest exits or the VM is stopped.
    pub(super) fn run(&self, controller: &mut VmController<'_>) -> io::Result<VmOutcome> {
        loop {
            let quit = self.wait_for_event(controller)?;
            // A guest that writes more marks meanwhile must not delay the other events.
            for (mark, at) in self.marks.try_iter().take(MAX_MARKS) {
                controller.boot_stats.record_mark(mark, at);
                if mark == BootTimer::INIT_MARK && controller.boot_stats.phase == "boot" {
                    controller.end_phase("first-minute", at);
                }
            }
            if self.rest_of_first_minute(controller) == Some(Duration::ZERO) {
                controller.end_phase("run", self.start_time.elapsed());
            }
            while let Some(pending) = self.api.and_then(ApiServer::next_request) {
                let response = controller.execute(pending.request);
                pending.respond(response);
            }
            if let Some(exit) = controller.vm.vcpus.guest_exit() {
                return Ok(exit);
            }
            if quit {
                return Ok(VmOutcome::Stopped("the escape key"));
            }
            if controller.is_stop_requested {
                return Ok(VmOutcome::Stopped("the control socket"));
            }
            match self.signals.next_request() {
                Some(SignalRequest::Terminate(signal)) => return Ok(VmOutcome::Stopped(signal)),
                Some(SignalRequest::Continue) => {
                    // The terminal may be gone, which is no reason to end the guest.
                    if let Some(Err(error)) = self.terminal.map(Terminal::set_raw) {
                        log::warn!("the terminal is not in raw mode: {error}");
                    }
                }
                None => {}
            }
        }
    }

    /// Waits for an event. Returns whether the escape key was typed.
    fn wait_for_event(&self, controller: &VmController<'_>) -> io::Result<bool> {
        let readable = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut fds = vec![
            readable(borrow_event(self.quit_event)),
            readable(borrow_event(self.wake_event)),
            readable(self.signals.as_fd()),
        ];
        fds.extend(self.api.map(|api| readable(borrow_event(&api.request_event))));
        let timeout = self.rest_of_first_minute(controller).map(|rest| Timespec {
            tv_sec: i64::try_from(rest.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: rest.subsec_nanos().into(),
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let [quit, woken] = [0, 1].map(|index: usize| !fds[index].revents().is_empty());
        if woken {
            // The caller checks all sources after this read; a later event signals again.
            let _ = self.wake_event.read();
        }
        Ok(quit)
    }

    /// Returns the time left in phase `first-minute`, or `None` in another phase.
    fn rest_of_first_minute(&self, controller: &VmController<'_>) -> Option<Duration> {
        let boot = &controller.boot_stats;
        let end = boot.phase_start + FIRST_MINUTE;
        (boot.phase == "first-minute").then(|| end.saturating_sub(self.start_time.elapsed()))
    }
}
