//! A socket of either kind that can be watched while somebody else reads and writes it.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustix::net::{Shutdown, shutdown};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpStream, UnixStream};

/// How often the end of a stream is looked for behind bytes that nobody reads yet.
const UNREAD: Duration = Duration::from_millis(100);

/// A connected socket; clones are the same one.
#[derive(Clone)]
pub struct Socket(Arc<Stream>);

enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// Calls a method of whichever stream it is.
macro_rules! of_stream {
    ($socket:expr, $stream:ident => $call:expr) => {
        match &*$socket.0 {
            Stream::Tcp($stream) => $call,
            Stream::Unix($stream) => $call,
        }
    };
}

impl From<TcpStream> for Socket {
    fn from(stream: TcpStream) -> Self {
        Self(Arc::new(Stream::Tcp(stream)))
    }
}

impl From<UnixStream> for Socket {
    fn from(stream: UnixStream) -> Self {
        Self(Arc::new(Stream::Unix(stream)))
    }
}

impl Socket {
    /// Waits until the other side has said that it writes nothing more, or is gone.
    pub async fn read_ended(&self) {
        loop {
            match of_stream!(self, stream => stream.ready(Interest::READABLE).await) {
                Ok(ready) if !ready.is_read_closed() => tokio::time::sleep(UNREAD).await,
                _ => return,
            }
        }
    }

    /// Waits until the other side has refused what was written to it.
    pub async fn broken(&self) {
        // Not to be watched means not to be used either.
        let _ = of_stream!(self, stream => stream.ready(Interest::ERROR).await);
    }

    /// Writes what can be written at once.
    pub fn write_now(&self, bytes: &[u8]) -> io::Result<usize> {
        of_stream!(self, stream => stream.try_write(bytes))
    }

    /// Says that nothing more is written.
    pub fn end_writing(&self) -> io::Result<()> {
        Ok(of_stream!(self, stream => shutdown(stream, Shutdown::Write))?)
    }

    fn poll_write_with(
        &self,
        context: &mut Context<'_>,
        write: impl Fn(&Self) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(of_stream!(self, stream => stream.poll_write_ready(context)))?;
            match write(self) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                outcome => return Poll::Ready(outcome),
            }
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(of_stream!(self, stream => stream.poll_read_ready(context)))?;
            let free = buffer.initialize_unfilled();
            match of_stream!(self, stream => stream.try_read(free)) {
                Ok(bytes) => {
                    buffer.advance(bytes);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_with(context, |socket| socket.write_now(bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The system has no buffer to be asked for.
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.end_writing())
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_with(
            context,
            |socket| of_stream!(socket, stream => stream.try_write_vectored(parts)),
        )
    }
}
