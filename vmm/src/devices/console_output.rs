// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Console output: a buffer for the bytes that a guest writes to its console, and a thread that
//! writes them to a file descriptor.
//!
//! The reader of that descriptor may stall, for example a pager or a suspended terminal. Only the
//! thread then blocks in a write. A device appends to the buffer without waiting, so that it never
//! blocks with its lock held. The vCPU or worker that produced the bytes waits for space afterwards
//! ([`ConsoleOutput::wait_for_space`]), and can stop waiting when the VM pauses or ends. A slow
//! reader therefore slows down only the guest, as with a real port.

use std::{
    collections::VecDeque,
    io::{self, Write},
    mem,
    os::fd::AsFd,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::{Errno, retry_on_intr},
};

/// Number of buffered bytes above which writers wait.
const BUFFER_CAPACITY: usize = 64 << 10;
/// Number of bytes that the thread writes at a time; each write wakes waiting writers.
const CHUNK_SIZE: usize = 4096;
/// Interval at which [`ConsoleOutput::wait_for_space`] checks whether to stop waiting.
const CANCEL_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Time without progress after which [`ConsoleOutput::finish`] returns.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);

/// Handle of the output buffer; clones share the buffer.
#[derive(Debug, Clone)]
pub struct ConsoleOutput(Arc<OutputBuffer>);

#[derive(Debug, Default)]
struct OutputBuffer {
    pending_output: Mutex<PendingOutput>,
    /// Signals new bytes, or the end of output.
    input_event: Condvar,
    /// Signals progress of the thread.
    written_event: Condvar,
}

#[derive(Debug, Default)]
struct PendingOutput {
    /// Bytes that the thread has not yet written.
    bytes: VecDeque<u8>,
    is_closed: bool,
}

impl ConsoleOutput {
    /// Starts the thread that writes to `fd`. The thread runs `prepare` first.
    ///
    /// # Errors
    /// The thread cannot be started, or `prepare` fails.
    pub fn new(
        fd: impl AsFd + Send + 'static,
        prepare: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> io::Result<Self> {
        let output = Self(Arc::default());
        let buffer = Arc::clone(&output.0);
        let (sender, prepared) = mpsc::sync_channel(1);
        thread::Builder::new().name("console-out".to_owned()).spawn(move || {
            let result = prepare();
            let ready = result.is_ok();
            if sender.send(result).is_ok() && ready {
                buffer.run(&fd);
            }
        })?;
        prepared
            .recv()
            .map_err(|_| io::Error::other("the console thread ended before its first write"))??;
        Ok(output)
    }

    /// Waits until the buffer has space or `is_cancelled` returns true. Returns whether it has
    /// space.
    pub fn wait_for_space(&self, is_cancelled: impl Fn() -> bool) -> bool {
        let mut pending = self.0.pending_output.lock();
        while pending.bytes.len() >= BUFFER_CAPACITY {
            if is_cancelled() {
                return false;
            }
            self.0.written_event.wait_for(&mut pending, CANCEL_POLL_INTERVAL);
        }
        true
    }

    /// Waits until all bytes are written, or the reader makes no progress. Returns the number of
    /// unwritten bytes, which the thread keeps writing until the process exits.
    #[must_use]
    pub fn finish(&self) -> usize {
        let mut pending = self.0.pending_output.lock();
        pending.is_closed = true;
        self.0.input_event.notify_one();
        loop {
            let unwritten = pending.bytes.len();
            if unwritten == 0 {
                return 0;
            }
            self.0.written_event.wait_for(&mut pending, FINISH_TIMEOUT);
            if pending.bytes.len() >= unwritten {
                return unwritten;
            }
        }
    }
}

impl Write for ConsoleOutput {
    /// Appends all bytes, even beyond the capacity.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.pending_output.lock().bytes.extend(bytes);
        self.0.input_event.notify_one();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl OutputBuffer {
    /// Writes the pending bytes to `fd` until the buffer is closed and empty.
    fn run(&self, fd: &impl AsFd) {
        let mut failed = false;
        let mut pending = self.pending_output.lock();
        loop {
            while pending.bytes.is_empty() {
                if pending.is_closed {
                    return;
                }
                self.input_event.wait(&mut pending);
            }
            let chunk: Vec<u8> = pending.bytes.iter().copied().take(CHUNK_SIZE).collect();
            let written = MutexGuard::unlocked(&mut pending, || write_all(fd, &chunk));
            if let Err(error) = written
                && !mem::replace(&mut failed, true)
            {
                log::warn!("all further console output is lost: {error}");
            }
            pending.bytes.drain(..chunk.len());
            self.written_event.notify_all();
        }
    }
}

/// Writes all bytes to a descriptor, which another process may have made non-blocking.
fn write_all(fd: &impl AsFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(fd, bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                retry_on_intr(|| poll(&mut [PollFd::new(fd, PollFlags::OUT)], None))?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{io::Read as _, time::Instant};

    use super::*;

    fn output_to_pipe(nonblocking: bool) -> (ConsoleOutput, io::PipeReader) {
        let (reader, writer) = io::pipe().unwrap();
        rustix::io::ioctl_fionbio(&writer, nonblocking).unwrap();
        (ConsoleOutput::new(writer, || Ok(())).unwrap(), reader)
    }

    fn read_to_end(mut reader: io::PipeReader) -> Vec<u8> {
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn all_bytes_arrive_in_order() {
        let (mut output, reader) = output_to_pipe(false);
        let written: Vec<u8> = (0..251).cycle().take(300_000).collect();
        let reader = thread::spawn(move || read_to_end(reader));

        for byte in &written {
            output.write_all(&[*byte]).unwrap();
            assert!(output.wait_for_space(|| false));
        }
        let unwritten = output.finish();

        assert_eq!(unwritten, 0);
        // The thread ends after the last byte and closes the pipe.
        assert!(reader.join().unwrap() == written);
    }

    #[test]
    fn the_wait_for_a_stalled_reader_can_be_cancelled() {
        let (mut output, reader) = output_to_pipe(false);
        let mut written = 0;
        let deadline = Instant::now() + Duration::from_millis(300);

        while output.wait_for_space(|| Instant::now() > deadline) {
            output.write_all(&[7; 1000]).unwrap();
            written += 1000;
        }
        let start = Instant::now();
        let unwritten = output.finish();

        // The bytes fill the buffer and the pipe, which holds 64 KiB on most hosts.
        assert!((BUFFER_CAPACITY..4 << 20).contains(&written), "{written}");
        assert!(unwritten > 0 && unwritten <= BUFFER_CAPACITY + 1000, "{unwritten}");
        assert!(start.elapsed() < 3 * FINISH_TIMEOUT);
        // A reader that continues receives all bytes.
        assert_eq!(read_to_end(reader).len(), written);
    }

    #[test]
    fn a_nonblocking_pipe_loses_no_bytes() {
        let (mut output, reader) = output_to_pipe(true);

        output.write_all(&[7; 200_000]).unwrap();
        let reader = thread::spawn(move || read_to_end(reader).len());

        assert_eq!(output.finish(), 0);
        assert_eq!(reader.join().unwrap(), 200_000);
    }

    #[test]
    fn a_closed_reader_does_not_stop_the_output() {
        let (mut output, reader) = output_to_pipe(false);
        drop(reader);

        output.write_all(&[7; 200_000]).unwrap();

        assert!(output.wait_for_space(|| false));
        assert_eq!(output.finish(), 0);
    }

    #[test]
    fn a_failed_preparation_is_an_error() {
        let (_reader, writer) = io::pipe().unwrap();

        let output = ConsoleOutput::new(writer, || Err(io::ErrorKind::PermissionDenied.into()));

        assert_eq!(output.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
}
