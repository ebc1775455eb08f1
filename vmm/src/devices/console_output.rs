// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The way out for what the guest says on its console: a buffer, and a thread that writes it to a
//! file descriptor.
//!
//! Whoever reads there may stall: a pager that waits for a key, a frozen connection. The thread is
//! the only one that waits in a write then. A device's output is always taken, so no device waits
//! with its lock held; who brings it asks for room before it brings more
//! ([`ConsoleOutput::wait_for_space`]) and can give up waiting when the machine is to stand still or to
//! end. So the guest waits for its reader, as with a real port, and nobody else does.

use std::{
    fmt,
    io::{self, Write},
    mem,
    os::fd::AsFd,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use parking_lot::{Condvar, Mutex};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
};

/// Bytes that wait before there is no room.
const BOUND: usize = 64 << 10;

/// Bytes written at once, after which there may be room again.
const PIECE: usize = 4096;

/// How often somebody who waits for room looks whether to go on waiting.
const LOOK: Duration = Duration::from_millis(50);

/// How long a reader may take for nothing at the end before the rest is given up.
const PATIENCE: Duration = Duration::from_secs(2);

/// The way out; its copies lead to the same place.
#[derive(Clone)]
pub struct ConsoleOutput(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// There is something to write, or nothing comes any more.
    news: Condvar,
    /// Something was written.
    progress: Condvar,
}

#[derive(Default)]
struct State {
    waiting: Vec<u8>,
    /// Taken by the thread and not written yet.
    under_way: usize,
    closed: bool,
}

impl State {
    const fn left(&self) -> usize {
        self.waiting.len() + self.under_way
    }
}

impl fmt::Debug for ConsoleOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsoleOutput").finish_non_exhaustive()
    }
}

impl ConsoleOutput {
    /// A way out to `to`. The thread does `prepare` before anything else.
    ///
    /// # Errors
    /// No thread can be had, or it cannot be prepared.
    pub fn new(
        to: impl AsFd + Send + 'static,
        prepare: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> io::Result<Self> {
        let outlet = Self(Arc::default());
        let shared = Arc::clone(&outlet.0);
        let (prepared, ready) = mpsc::sync_channel(1);
        thread::Builder::new()
            .name("console-out".to_owned())
            .spawn(move || {
                let result = prepare();
                let go_on = result.is_ok();
                if prepared.send(result).is_ok() && go_on {
                    shared.carry(&to);
                }
            })?;
        ready
            .recv()
            .map_err(|_| io::Error::other("the console's thread ended before it began"))??;
        Ok(outlet)
    }

    /// Waits while there is no room and `give_up` says no; says whether there is room.
    pub fn wait_for_space(&self, give_up: impl Fn() -> bool) -> bool {
        let mut state = self.0.state.lock();
        while state.left() >= BOUND {
            if give_up() {
                return false;
            }
            self.0.progress.wait_for(&mut state, LOOK);
        }
        true
    }

    /// Waits until everything is written, for as long as somebody reads. What is left then is
    /// given up; says how many bytes that is. What is brought later is written if the process
    /// lives for long enough.
    #[must_use]
    pub fn finish(&self) -> usize {
        let mut state = self.0.state.lock();
        state.closed = true;
        self.0.news.notify_one();
        loop {
            let left = state.left();
            if left == 0 {
                return 0;
            }
            self.0.progress.wait_for(&mut state, PATIENCE);
            if state.left() >= left {
                return left;
            }
        }
    }
}

impl Write for ConsoleOutput {
    /// Takes everything, whether there is room or not.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.0.state.lock();
        state.waiting.extend_from_slice(bytes);
        drop(state);
        self.0.news.notify_one();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Shared {
    /// The thread: writes until nothing comes any more.
    fn carry(&self, to: &impl AsFd) {
        let mut bytes = Vec::new();
        let mut told = false;
        loop {
            let mut state = self.state.lock();
            while state.waiting.is_empty() {
                if state.closed {
                    return;
                }
                self.news.wait(&mut state);
            }
            bytes.clear();
            mem::swap(&mut bytes, &mut state.waiting);
            state.under_way = bytes.len();
            drop(state);
            for piece in bytes.chunks(PIECE) {
                if let Err(error) = write_all(to, piece)
                    && !mem::replace(&mut told, true)
                {
                    log::warn!("the guest's console output is lost from here on: {error}");
                }
                self.state.lock().under_way -= piece.len();
                self.progress.notify_all();
            }
        }
    }
}

/// Writes all of it, to a file descriptor that may be non-blocking: who else has it may want that.
fn write_all(to: &impl AsFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(to, bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => match poll(&mut [PollFd::new(to, PollFlags::OUT)], None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            },
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{io::Read as _, time::Instant};

    use super::*;

    fn outlet(to: impl AsFd + Send + 'static) -> ConsoleOutput {
        ConsoleOutput::new(to, || Ok(())).unwrap()
    }

    #[test]
    fn what_was_said_before_the_end_arrives_whole_and_in_order() {
        let (mut screen, to) = io::pipe().unwrap();
        let mut outlet = outlet(to);
        let said: Vec<u8> = (0..251).cycle().take(300_000).collect();
        let reader = thread::spawn(move || {
            let mut seen = Vec::new();
            screen.read_to_end(&mut seen).unwrap();
            seen
        });

        for byte in &said {
            outlet.write_all(&[*byte]).unwrap();
            assert!(outlet.wait_for_space(|| false));
        }
        let left = outlet.finish();

        assert_eq!(left, 0);
        // The thread ends behind the last byte, and closes the pipe.
        assert!(reader.join().unwrap() == said);
    }

    #[test]
    fn a_reader_that_stalls_is_waited_for_until_that_is_given_up() {
        let (mut screen, to) = io::pipe().unwrap();
        let mut outlet = outlet(to);
        let mut brought = 0;
        let until = Instant::now() + Duration::from_millis(300);

        while outlet.wait_for_space(|| Instant::now() > until) {
            outlet.write_all(&[7; 1000]).unwrap();
            brought += 1000;
        }
        let begun = Instant::now();
        let left = outlet.finish();

        // What a pipe holds (64 KiB on most hosts), and what we do.
        assert!((BOUND..4 << 20).contains(&brought), "{brought}");
        assert!(left > 0 && left <= BOUND + 1000, "{left}");
        assert!(begun.elapsed() < 3 * PATIENCE);
        // A reader that goes on after all loses nothing while the process lives.
        let mut seen = Vec::new();
        screen.read_to_end(&mut seen).unwrap();
        assert_eq!(seen.len(), brought);
    }

    #[test]
    fn a_pipe_that_does_not_block_loses_nothing() {
        let (mut screen, to) = io::pipe().unwrap();
        rustix::io::ioctl_fionbio(&to, true).unwrap();
        let mut outlet = outlet(to);

        outlet.write_all(&[7; 200_000]).unwrap();
        let reader = thread::spawn(move || {
            let mut seen = Vec::new();
            screen.read_to_end(&mut seen).unwrap();
            seen.len()
        });

        assert_eq!(outlet.finish(), 0);
        assert_eq!(reader.join().unwrap(), 200_000);
    }

    #[test]
    fn a_reader_that_is_gone_stops_nothing() {
        let (screen, to) = io::pipe().unwrap();
        drop(screen);
        let mut outlet = outlet(to);

        outlet.write_all(&[7; 200_000]).unwrap();

        assert!(outlet.wait_for_space(|| false));
        assert_eq!(outlet.finish(), 0);
    }

    #[test]
    fn a_thread_that_cannot_be_prepared_is_an_error() {
        let (_screen, to) = io::pipe().unwrap();

        let made = ConsoleOutput::new(to, || Err(io::ErrorKind::PermissionDenied.into()));

        assert_eq!(made.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
}
