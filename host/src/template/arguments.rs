//! Arguments that may be given by position or by name, as in Python.

use minijinja::value::{Kwargs, Rest, Value, ValueOrKwargs};
use minijinja::{Error, ErrorKind};

/// The arguments of one call.
pub(super) struct Arguments {
    positional: Vec<Value>,
    named: Kwargs,
}

impl Arguments {
    /// Takes a call apart. More than `limit` positional arguments are an error.
    pub(super) fn new(args: Rest<ValueOrKwargs>, limit: usize) -> Result<Self, Error> {
        let mut positional = args.into_values();
        let named = match positional.pop_if(|last| last.is_kwargs()) {
            Some(named) => Kwargs::try_from(named)?,
            None => Kwargs::from_iter(Vec::<(&str, Value)>::new()),
        };
        if positional.len() > limit {
            return Err(Error::from(ErrorKind::TooManyArguments));
        }
        Ok(Arguments { positional, named })
    }

    /// The argument at `index` or called `name`. `None` is what Python's `None` default is.
    pub(super) fn get(&self, index: usize, name: &str) -> Result<Option<Value>, Error> {
        let value = match self.positional.get(index) {
            Some(value) => Some(value.clone()),
            None => self.named.get::<Option<Value>>(name)?,
        };
        Ok(value.filter(|value| !value.is_none()))
    }

    /// As [`Arguments::get`], as a truth value.
    pub(super) fn flag(&self, index: usize, name: &str) -> Result<bool, Error> {
        Ok(self.get(index, name)?.is_some_and(|value| value.is_true()))
    }

    /// Fails if a name was given that no `get` asked for.
    pub(super) fn finish(&self) -> Result<(), Error> {
        self.named.assert_all_used()
    }
}
