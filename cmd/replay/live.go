package main

import (
	"context"
	"errors"
	"io"
)

func runLive(context.Context, []string, io.Writer, io.Writer) error {
	return errors.New("not yet")
}
